from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from starlette.types import ASGIApp
from tests.quickstop import servers_stop_at_once
from tests.service.stores.disk.loopdisk import LoopDisk, LoopDiskError

from kvstow.control import pooltier
from kvstow_service.admin.server import AdminServer
from kvstow_service.admin.sockets import AdminSockets, TcpAddress
from kvstow_service.admin.tls import ServerTls
from kvstow_service.process.logwriter import LogWriter
from kvstow_service.stores.disk.diskfiles import PathError, open_folder

__all__ = ["servers_stop_at_once"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def process_state() -> Iterator[None]:
    """Puts back what the service's process owns: signal handlers and the loggers that it configures."""
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    }
    loggers = [logging.getLogger(name) for name in ("kvstow", "uvicorn", "asyncio")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for logger, (log_handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = log_handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def child_environ() -> dict[str, str]:
    """For processes that find the same modules as the tests, and none of the settings of the user who runs them."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("KVSTOW_")}
    return {**ours, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for the store below the pools as long as it takes on a busy machine."""
    monkeypatch.setattr(pooltier, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(pooltier, "UNKNOWN_SECONDS", 60.0)


@pytest.fixture
def make_loop_disk(tmp_path: Path, stack: ExitStack) -> Callable[[str, int], LoopDisk]:
    if os.geteuid():
        pytest.skip("only root mounts file systems")

    def make(file_system: str = "ext4", num_bytes: int = 512 << 20) -> LoopDisk:
        try:
            disk = LoopDisk(tmp_path, file_system, num_bytes)
        except LoopDiskError as error:
            pytest.skip(str(error))
        stack.callback(disk.unmount)
        return disk

    return make


@pytest.fixture
def disk_folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    try:
        os.close(open_folder(tmp_path))
    except PathError:
        make: Callable[[], LoopDisk] = request.getfixturevalue("make_loop_disk")
        return make().folder
    return tmp_path


Serving = Callable[..., tuple[AdminServer, AdminSockets]]


@pytest.fixture
def serving() -> Iterator[Serving]:
    """Starts admin servers for ASGI apps; all are stopped at the end."""
    with ExitStack() as running:

        def serve(
            app: ASGIApp,
            *,
            port: int = 0,
            uds: Path | None = None,
            tls: ServerTls | None = None,
            clock: Callable[[], float] = time.monotonic,
            log: LogWriter | None = None,
        ) -> tuple[AdminServer, AdminSockets]:
            listeners = AdminSockets(TcpAddress.resolve("127.0.0.1", port), secure=tls is not None)
            running.callback(listeners.close)
            if uds is not None:
                listeners.listen_unix(uds)
            server = AdminServer(
                app,
                listeners.sockets,
                lambda reason: pytest.fail(reason),
                tls=tls,
                log=log,
                clock=clock,
            )
            server.start()
            running.callback(server.stop)
            return server, listeners

        yield serve
