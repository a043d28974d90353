"""The admin server: uvicorn on a thread and an event loop of its own, inside a process that owns the signals."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from socket import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from kvstow.errors import ConflictError

logger = logging.getLogger("kvstow.server")

_START_SECONDS = 10.0
_GRACE_SECONDS = 2  # for responses under way when the server stops; streams are cut off then


class AdminServer:
    """Serves one ASGI app on sockets that are bound already.

    Guarantees: `start` returns when requests are answered; `stop` is idempotent, ends the thread and closes
    the sockets; the process's signal handlers, loggers and event loop policy stay untouched; `on_failure` is
    called, on the server's thread, when the server ends without `stop`.
    """

    def __init__(self, app: ASGIApp, sockets: Sequence[socket], on_failure: Callable[[str], None]) -> None:
        self._sockets = list(sockets)
        self._on_failure = on_failure
        self._server = _QuietServer(
            uvicorn.Config(
                app,
                http=_QuietProtocol,
                loop="asyncio",  # uvicorn before 0.36 makes uvloop, if there is one, the policy of the whole process
                log_config=None,
                server_header=False,
                lifespan="on",
                ws="none",
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._thread = threading.Thread(target=self._run, name="kvstow-admin", daemon=True)

    def start(self) -> None:
        """Raises `ConflictError` when the server does not come up."""
        self._thread.start()
        if not self._server.answering.wait(_START_SECONDS) or not self._server.started:
            self.stop()
            raise ConflictError("the admin server did not start; the log says why")

    def stop(self, timeout: float = 10.0) -> None:
        self._server.should_exit = True
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
    """Logs no requests. The option of uvicorn's for that takes the handlers from a logger that the host's own server
    may use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False


class _QuietServer(uvicorn.Server):
    """uvicorn without signal handlers; `answering` is set once it listens on all sockets."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answering = threading.Event()

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        self.answering.set()

    async def main_loop(self) -> None:
        try:
            await super().main_loop()
        except Exception:
            await self.shutdown()  # or clients would wait for answers that never come
            raise

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
