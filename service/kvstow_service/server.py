"""The admin server: uvicorn on a thread and an event loop of its own, inside a process that owns the signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from collections.abc import Callable, Generator, Sequence
from socket import AF_UNIX, socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from kvstow.errors import ConflictError
from kvstow_api.auth import CERTIFICATE
from kvstow_service.certificate import subject_of

logger = logging.getLogger("kvstow.server")

_START_SECONDS = 10.0
_HEAD_SECONDS = 30.0
_GRACE_SECONDS = 2  # for requests under way when the server stops
_TICK_SECONDS = 1.0  # the Date of answers is renewed so often


class AdminServer:
    """Serves one ASGI app on sockets that are bound already.

    Guarantees: `start` returns when requests are answered; `stop` is idempotent, ends the thread and closes
    the sockets; the process's signal handlers, loggers and event loop policy stay untouched; `on_failure` is
    called, on the server's thread, when the server ends without `stop`. With `tls`, TCP sockets speak it; Unix
    sockets never do. A connection that has not sent a whole request head in 30 s is closed.
    """

    def __init__(
        self,
        app: ASGIApp,
        sockets: Sequence[socket],
        on_failure: Callable[[str], None],
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._sockets = list(sockets)
        self._on_failure = on_failure
        self._server = _QuietServer(
            uvicorn.Config(
                app,
                http=_QuietProtocol,
                loop="asyncio",  # uvicorn before 0.36 makes uvloop, if there is one, the policy of the whole process
                log_config=None,
                server_header=False,
                proxy_headers=False,  # by default a client on loopback could say that it is another one
                lifespan="on",
                ws="none",
                timeout_graceful_shutdown=_GRACE_SECONDS,
            ),
            tls,
        )
        self._thread = threading.Thread(target=self._run, name="kvstow-admin", daemon=True)

    def start(self) -> None:
        """Raises `ConflictError` when the server does not come up."""
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
        try:
            self._server.run(self._sockets)
        except (Exception, SystemExit) as error:  # uvicorn ends a failed start with SystemExit
            reason = repr(error)
            logger.exception("the admin server failed")
        self._server.answering.set()
        if not self._server.should_exit:
            self._on_failure(f"the admin server ended: {reason}")


class _QuietProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Tells the application who has shown a certificate, gives up on clients that send no request, and logs no
    requests. The option of uvicorn's for that takes the handlers from a logger that the host's own server
    may use."""

    app_state: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        certificate = transport.get_extra_info("peercert")
        # TLS 1.2 may take a session up again, and then does not ask whether the authority still is one.
        if certificate and not transport.get_extra_info("ssl_object").session_reused:
            self.app_state = {**self.app_state, CERTIFICATE: subject_of(certificate)}
        self._head_due = self.loop.call_later(_HEAD_SECONDS, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_due.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Hang up on streams, which would not end by themselves. What was written of other answers still goes out."""
        super().shutdown()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()

    def _give_up(self) -> None:
        """Close a connection on which no request has ever been complete: idle ones after that, uvicorn closes."""
        if self.cycle is None:
            self.transport.close()


class _QuietServer(uvicorn.Server):
    """uvicorn without signal handlers; `answering` is set once it listens on all sockets.

    It is told when to end: uvicorn's own loop looks ten times a second, which took the interpreter for 2 ms of each.
    """

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        self.answering = threading.Event()

    def end(self) -> None:
        """Stop serving; on any thread, at any time."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: the server has ended
                self._loop.call_soon_threadsafe(self._ending.set)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        given = sockets or []
        guarded = [listener for listener in given if self._tls is not None and listener.family != AF_UNIX]
        await super().startup([listener for listener in given if listener not in guarded])
        if not self.should_exit:
            for listener in guarded:
                self.servers.append(await self._loop.create_server(self._protocol, sock=listener, ssl=self._tls))
        self.answering.set()

    def _protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def main_loop(self) -> None:
        try:
            while not await self.on_tick(0):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_SECONDS):
                        await self._ending.wait()
        except Exception:
            await self.shutdown()  # or clients would wait for answers that never come
            raise

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
