"""The admin server: uvicorn on its own thread and event loop. The host process handles signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Callable, Generator, Sequence
from socket import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from kvstow.errors import ConflictError
from kvstow_api.limitedlog import LimitedLog
from kvstow_service.admin.acceptor import Acceptor
from kvstow_service.admin.connections import Connection, Connections, connection_limit
from kvstow_service.admin.protocol import AdminProtocol
from kvstow_service.admin.requestqueue import RequestQueue
from kvstow_service.process.logwriter import LogWriter

logger = logging.getLogger("kvstow.server")

_START_SECONDS = 30.0
_GRACE_SECONDS = 2  # for requests under way when the server stops
_TICK_SECONDS = 1.0  # between updates of the Date header and checks of the connections' deadlines


class AdminServer:
    """Serves an ASGI app on sockets that are already bound.

    Guarantees: `start` returns when the server answers requests. `stop` is idempotent, ends the thread and closes the
    sockets. The process's signal handlers, loggers and event loop policy are left alone. `on_failure` is called on the
    server's thread if the server ends without `stop`. With `tls`, TCP sockets use it; Unix sockets never do. Clients
    can use only a bounded amount of memory, time, descriptors and log lines (`AdminProtocol`, `Connections`).
    """

    def __init__(
        self,
        app: ASGIApp,
        sockets: Sequence[socket],
        on_failure: Callable[[str], None],
        *,
        tls: ssl.SSLContext | None = None,
        log: LogWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log` writes what the server's thread logs; None in a process whose log blocks no thread (`QueuedLog`)."""
        self.connections = Connections(connection_limit(), clock)
        self._sockets = list(sockets)
        self._on_failure = on_failure
        self._log = log
        self._server = _EmbeddedUvicorn(
            uvicorn.Config(
                app,
                http=AdminProtocol,
                # uvicorn before 0.36 makes uvloop, if installed, the event loop policy of the whole process.
                loop="asyncio",
                log_config=None,
                server_header=False,
                proxy_headers=False,  # by default a client on loopback could claim another client's address
                lifespan="on",
                ws="none",
                timeout_graceful_shutdown=_GRACE_SECONDS,
            ),
            tls,
            self.connections,
        )
        self._thread = threading.Thread(target=self._run, name="kvstow-admin", daemon=True)

    def start(self) -> None:
        """Raises `ConflictError` if the server does not start."""
        self._thread.start()
        if not self._server.answering.wait(_START_SECONDS) or not self._server.started:
            self.stop()
            raise ConflictError("the admin server did not start; the log says why")

    def stop(self, timeout: float = 10.0) -> None:
        self._server.end()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        for listener in self._sockets:
            listener.close()

    def _run(self) -> None:
        reason = "it returned"
        if self._log is not None:
            self._log.start()
        try:
            self._server.run(self._sockets)
        except (Exception, SystemExit) as error:  # uvicorn ends a failed start with SystemExit
            reason = repr(error)
            logger.exception("the admin server failed")
        if self._log is not None:
            self._log.stop()
        self._server.answering.set()
        if not self._server.should_exit:
            self._on_failure(f"the admin server ended: {reason}")


class _EmbeddedUvicorn(uvicorn.Server):
    """uvicorn without signal handlers; `answering` is set when it listens on all sockets.

    `end` wakes it up. uvicorn's own loop polls ten times a second and held the GIL for 2 ms of each.
    """

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None, connections: Connections) -> None:
        super().__init__(config)
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        self._connections = connections
        self._queue = RequestQueue()
        self._acceptor: Acceptor | None = None
        self.answering = threading.Event()

    def end(self) -> None:
        """Stop serving. Thread-safe, at any time."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                self._loop.call_soon_threadsafe(self._ending.set)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_report_once_a_minute())
        await super().startup([])
        self._acceptor = Acceptor(sockets or [], self._connections, self._protocol, self._tls)
        if not self.should_exit:
            self._acceptor.start()
        self.answering.set()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.stop()
        await super().shutdown(sockets)

    def _protocol(self, connection: Connection) -> AdminProtocol:
        return AdminProtocol(
            connection,
            self._connections,
            self._queue,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    async def main_loop(self) -> None:
        try:
            while not await self.on_tick(0):
                self._connections.expire()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_SECONDS):
                        await self._ending.wait()
        except Exception:
            await self.shutdown()  # otherwise clients would wait for responses that never come
            raise

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _report_once_a_minute() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """A handler for exceptions that reach the event loop; a client may be able to cause one repeatedly."""
    log = LimitedLog(logger)

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        log.log(logging.ERROR, "%s", context["message"], exc_info=context.get("exception"))

    return handle
