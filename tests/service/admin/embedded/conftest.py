"""Admin servers of engines in this process, as an inference engine holds them."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.doubles.rank import ready_report
from tests.waiting import eventually

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.messages import DesiredState, RankReport
from kvstow_service.admin.adminhost import AdminOptions
from kvstow_service.admin.agent import RankAgent
from kvstow_service.admin.embedded import EmbeddedAdmin
from kvstow_service.admin.rendezvous import Rendezvous
from kvstow_service.admin.sockets import AdminSockets, TcpAddress

SLOT = 4096
CAPACITY = 8
ANY_PORT = AdminOptions(port=0)


class PinnedRank:
    """A rank that has pinned everything, and remembers what is wanted of it."""

    def __init__(self, rank: int = 0) -> None:
        self._report = ready_report(SLOT, CAPACITY, rank=rank, boot_id=f"boot-{rank}", number=0)
        self.applied: list[DesiredState] = []

    def report(self) -> RankReport:
        self._report = replace(self._report, number=self._report.number + 1)
        return self._report

    def apply(self, desired: DesiredState) -> None:
        self.applied.append(desired)

    def add_listener(self, callback: Callable[[], None]) -> None:
        """It never changes."""


@pytest.fixture(autouse=True)
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """A file with the token of people."""
    path = tmp_path / "token"
    path.write_text("of-people")
    return path


@pytest.fixture
def engine() -> OffloadEngine:
    return OffloadEngine(EngineConfig(slot_bytes=SLOT, capacity_slots=CAPACITY))


@pytest.fixture
def make(engine: OffloadEngine, environ: dict[str, str], stack: ExitStack) -> Callable[..., EmbeddedAdmin]:
    """Makes servers, which are stopped at the end."""

    def make_admin(options: AdminOptions = ANY_PORT, **changes: Any) -> EmbeddedAdmin:
        given = {"identity": "engine", "mode": "vllm", "max_capacity_slots": CAPACITY, "environ": environ}
        admin = EmbeddedAdmin(changes.pop("engine", engine), options, **{**given, **changes})
        stack.callback(admin.stop)
        return admin

    return make_admin


@pytest.fixture
def launch(make: Any) -> Callable[..., EmbeddedAdmin]:
    """Starts a server, and waits until it answers."""

    def launch_admin(*args: Any, **changes: Any) -> EmbeddedAdmin:
        admin: EmbeddedAdmin = make(*args, **changes)
        admin.start()
        eventually(lambda: admin.addresses or admin.failure, "an address")
        assert admin.failure is None
        return admin

    return launch_admin


@pytest.fixture
def report(environ: dict[str, str], stack: ExitStack) -> Callable[..., RankAgent]:
    """Starts an agent of a pinned rank, which looks for the server of `identity`."""

    def start_agent(identity: str = "engine", interval: float = 0.02) -> RankAgent:
        agent = RankAgent(0, PinnedRank(), Rendezvous(identity, environ), interval=interval)
        agent.start()
        stack.callback(agent.stop)
        return agent

    return start_agent


@pytest.fixture
def taken(stack: ExitStack) -> Callable[[int], None]:
    """Listens on a port for as long as the test runs."""

    def take(port: int) -> None:
        stack.callback(AdminSockets(TcpAddress.resolve("127.0.0.1", port)).close)

    return take


def over(uds: Path) -> httpx.Client:
    return httpx.Client(base_url="http://kvstow", transport=httpx.HTTPTransport(uds=str(uds)))


def uds_of(admin: EmbeddedAdmin) -> Path:
    (address,) = (address for address in admin.addresses if address.startswith("unix:"))
    return Path(address.removeprefix("unix:"))


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free."""
    for first in range(20_000, 30_000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")
