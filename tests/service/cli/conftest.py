"""A real engine with a real server, and a way to run commands against it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.doubles.rank import FakeRank, make_ranks, store_keys
from tests.service.cli.terminal import Terminal

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow_api.app import create_app
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.host import ApiHost
from kvstow_service.admin.server import AdminServer
from kvstow_service.admin.sockets import AdminSockets, TcpAddress
from kvstow_service.cli import app

SLOT_BYTES = 4096
CAPACITY = 16


class Host:
    """An engine of two ranks whose 16 slots of 4 KiB are pinned, and its admin server. It listens on `url`."""

    def __init__(self, stack: ExitStack, pinned: int = CAPACITY, **changes: Any) -> None:
        # The ranks report once; a slow machine may take its time after that.
        config = EngineConfig(
            slot_bytes=SLOT_BYTES, capacity_slots=CAPACITY, num_ranks=changes.pop("num_ranks", 2), report_timeout=3600.0
        )
        self.engine = OffloadEngine(config)
        self.ranks: list[FakeRank] = make_ranks(self.engine, pinned)
        tls = changes.pop("tls", None)
        address = TcpAddress.resolve(changes.pop("address", "127.0.0.1"), 0)
        listeners = AdminSockets(address, secure=tls is not None)
        stack.callback(listeners.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstow-test-"))
        listeners.listen_unix(changes.pop("uds", Path(folder) / "admin.sock"))
        directory = EmbeddedDirectory(self.engine, 2 * CAPACITY)
        directory.tier = changes.pop("make_tier", lambda engine: None)(self.engine)
        given = {"directory": directory, "version": "1.2.3", "mode": "test"}
        given["addresses"] = listeners.addresses
        server = AdminServer(create_app(ApiHost(**{**given, **changes})), listeners.sockets, pytest.fail, tls=tls)
        server.start()
        stack.callback(server.stop)
        self.url, self.stop = listeners.url, server.stop

    def store(self, *keys: bytes) -> None:
        store_keys(self.engine, self.ranks, keys)


Run = Callable[..., Result]


@pytest.fixture
def make_host() -> Iterator[Callable[..., Host]]:
    """Starts hosts; all are stopped at the end."""
    with ExitStack() as stack:
        yield lambda **changes: Host(stack, **changes)


@pytest.fixture
def host(make_host: Callable[..., Host]) -> Host:
    return make_host()


@pytest.fixture
def run() -> Run:
    """Runs `kvstow` without a terminal and without the variables of the user who runs the tests."""

    def invoke(*arguments: str, stdin: str | None = None, environ: dict[str, str] | None = None) -> Result:
        clean = {
            "KVSTOW_SERVER": None,
            "KVSTOW_TOKEN_FILE": None,
            "KVSTOW_CA_FILE": None,
        }
        return CliRunner().invoke(app, arguments, input=stdin, env={**clean, **(environ or {})})

    return invoke


@pytest.fixture
def kvstow(run: Run, host: Host) -> Run:
    """Runs `kvstow` against `host`."""

    def invoke(*arguments: str, stdin: str | None = None, environ: dict[str, str] | None = None) -> Result:
        return run(*arguments, stdin=stdin, environ={"KVSTOW_SERVER": host.url, **(environ or {})})

    return invoke


@pytest.fixture
def on_terminal(host: Host, child_environ: dict[str, str]) -> Callable[..., Terminal]:
    """Runs `kvstow` on a terminal against `host`."""
    return lambda *arguments, **given: Terminal(*arguments, "--server", host.url, environ=child_environ, **given)
