"""The application over a real engine; ranks report, and finish what they are told to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.api.tieredhost import TieredHost
from tests.doubles.fakes import FakeClock
from tests.quickstop import servers_stop_at_once

from kvstow.attach.calls import Report
from kvstow.attach.wire import CONTENT_TYPE
from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.messages import Completion, Mark, Op, RankReport
from kvstow.results import Lease
from kvstow_api import appstate
from kvstow_api.app import create_app
from kvstow_api.appstate import AppState
from kvstow_api.auth import CALLER
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.health import LoopMonitor
from kvstow_api.host import ApiHost
from kvstow_api.routes.server import loggers
from kvstow_service.admin.server import AdminServer
from kvstow_service.admin.sockets import AdminSockets, TcpAddress

__all__ = ["servers_stop_at_once"]

SLOT_BYTES = 4096
CAPACITY = 16
RANKS = 2
AGENT_TOKEN = "agent-token"
AGENT = {"Authorization": f"Bearer {AGENT_TOKEN}"}
"""Headers of a rank's agent."""
CALLER_UID = 1234
"""The user at the other end of the Unix socket."""


async def send_report(
    client: httpx.AsyncClient, content: RankReport | bytes, *, rank: object = 0, headers: Mapping[str, str] = AGENT
) -> httpx.Response:
    """Report as an agent on another host does. `content`: the report, or the bytes that stand for one."""
    body = Report.now(content).pack() if isinstance(content, RankReport) else content
    return await client.post(
        f"/v1/ranks/{rank}/report", content=body, headers={"Content-Type": CONTENT_TYPE, **headers}
    )


_numbers = count(1)


class Ranks:
    """All ranks of an engine, as far as its control plane can tell."""

    def __init__(self, engine: OffloadEngine) -> None:
        self.engine = engine

    def make_report(self, rank: int, **changes: Any) -> RankReport:
        slots = changes.pop("pinned_slots", self.engine.config.capacity_slots)
        wanted = self.engine.desired().capacity_slots
        given: dict[str, Any] = {
            "rank": rank,
            "sender": f"process-{rank}",
            "number": next(_numbers),
            "boot_id": f"boot-{rank}",
            "state": "ready",
            "slot_bytes": SLOT_BYTES,
            "pinned_slots": slots,
            "target_slots": wanted,
            "pinned_bytes": slots * SLOT_BYTES,
            "target_bytes": wanted * SLOT_BYTES,
            "host": "node",
            "pid": 1000 + rank,
            "device": f"cuda:{rank}",
        }
        return RankReport(**{**given, **changes})

    def report(self, **changes: Any) -> None:
        """Every rank reports the same."""
        for rank in range(self.engine.config.num_ranks):
            self.engine.report(self.make_report(rank, **changes))

    def finish(self, op: Op, mark: Mark = "done") -> None:
        """Every rank says this of the op."""
        said = Completion(op.op_id, mark, num_bytes=len(op.slots) * SLOT_BYTES, seconds=0.001)
        for rank in range(self.engine.config.num_ranks):
            self.engine.complete(rank, f"boot-{rank}", [said])

    def begin_store(self, keys: Sequence[bytes]) -> Op:
        op = self.engine.begin_store(keys, range(len(keys)), request_id="r-store").op
        assert op is not None
        return op

    def store(self, keys: Sequence[bytes]) -> None:
        self.finish(self.begin_store(keys))

    def lease(self, keys: Sequence[bytes]) -> Lease:
        lease = self.engine.lease(keys)
        assert lease is not None
        return lease


class Launch:
    """Makes applications, each with a client of it. `app`: the last one."""

    app: FastAPI

    def __init__(self, engine: OffloadEngine, clock: FakeClock, stack: AsyncExitStack) -> None:
        self._engine, self._clock, self._stack = engine, clock, stack

    @property
    def state(self) -> AppState:
        """What the routes of the last application share."""
        state: AppState = self.app.state.kvstow
        return state

    async def __call__(
        self,
        prepare: Callable[[FastAPI], object] | None = None,
        *,
        caller: int | None = CALLER_UID,
        **changes: Any,
    ) -> httpx.AsyncClient:
        """`changes`: of the context. `prepare` may change the application before it starts. `caller`: the uid of a
        client of the Unix socket; None for one over TCP."""
        given = {"directory": EmbeddedDirectory(self._engine, 2 * CAPACITY), "version": "1.2.3", "mode": "test"}
        self.app = create_app(ApiHost(**{**given, "agent_token": AGENT_TOKEN, "clock": self._clock, **changes}))
        if prepare:
            prepare(self.app)
        await self._stack.enter_async_context(self.app.router.lifespan_context(self.app))
        transport = httpx.ASGITransport(called_by(caller, self.app))
        return await self._stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://kvstow"))


async def pages(client: httpx.AsyncClient, path: str, **query: str | int) -> list[list[dict[str, Any]]]:
    """The items of each page."""
    found: list[list[dict[str, Any]]] = []
    token: str | None = ""
    while token is not None:
        body = (await client.get(path, params={**query, "page_token": token})).json()
        found.append(body["items"])
        token = body["next_page_token"]
    return found


class Eventually(Protocol):
    async def __call__(self, condition: Callable[[], Awaitable[bool]], *, seconds: float = ...) -> None: ...


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def engine(clock: FakeClock) -> OffloadEngine:
    """2 ranks, 16 slots of 4 KiB; no rank has reported."""
    config = EngineConfig(slot_bytes=SLOT_BYTES, capacity_slots=CAPACITY, num_ranks=RANKS, block_tokens=16)
    return OffloadEngine(config, clock=clock)


@pytest.fixture
def tiered_host(engine: OffloadEngine, clock: FakeClock) -> Iterator[TieredHost]:
    with closing(TieredHost(engine, clock)) as host:
        yield host


@pytest.fixture
def ranks(engine: OffloadEngine) -> Ranks:
    """The ranks of `engine`, which have pinned everything."""
    ranks = Ranks(engine)
    ranks.report()
    return ranks


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """With the admin's token, `admin-token`."""
    return write_token(tmp_path / "token", "admin-token")


@pytest.fixture
def viewer_file(tmp_path: Path) -> Path:
    """With a viewer's token, `viewer-token`."""
    return write_token(tmp_path / "viewer-token", "viewer-token")


def write_token(path: Path, token: str) -> Path:
    path.write_text(f"{token}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def keys() -> list[bytes]:
    return [b"\x00\x00" + bytes([n]) * 4 for n in range(CAPACITY)]


def called_by(uid: int | None, app: ASGIApp) -> ASGIApp:
    """The application as a client of this uid sees it through the Unix socket. None: as one sees it over TCP."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        state = {} if uid is None else {CALLER: uid}
        await app({**scope, "state": {**scope.get("state", {}), **state}}, receive, send)

    return call


@pytest.fixture
async def launch(engine: OffloadEngine, clock: FakeClock) -> AsyncIterator[Launch]:
    async with AsyncExitStack() as stack:
        yield Launch(engine, clock, stack)


@contextmanager
def running(engine: OffloadEngine, *, uds: Path | None = None, **changes: Any) -> Iterator[AdminSockets]:
    """An application on real sockets, with a context that differs by what is given."""
    given = {"directory": EmbeddedDirectory(engine, 2 * CAPACITY), "version": "1.2.3", "mode": "test"}
    with ExitStack() as stack:
        listeners = AdminSockets(TcpAddress.resolve("127.0.0.1", 0))
        stack.callback(listeners.close)
        if uds is not None:
            listeners.listen_unix(uds)
        app = create_app(ApiHost(**{**given, "agent_token": AGENT_TOKEN, **changes}))
        server = AdminServer(app, listeners.sockets, lambda reason: pytest.fail(reason))
        server.start()
        stack.callback(server.stop)
        yield listeners


class Serve(Protocol):
    def __call__(self, *, uds: Path | None = ..., **changes: Any) -> AdminSockets: ...


@pytest.fixture
def serve(engine: OffloadEngine) -> Iterator[Serve]:
    """Serves applications of `engine`; all are stopped at the end."""
    with ExitStack() as stack:

        def start(**changes: Any) -> AdminSockets:
            return stack.enter_context(running(engine, **changes))

        yield start


@pytest.fixture(scope="module")
def busy_url() -> Iterator[str]:
    """The URL of a service with some blocks, which goes on from one test of a module to the next."""
    engine = OffloadEngine(EngineConfig(slot_bytes=SLOT_BYTES, capacity_slots=CAPACITY, num_ranks=RANKS))
    ranks = Ranks(engine)
    ranks.report()
    ranks.store([bytes([0, 0, number]) for number in range(8)])
    levels = {name: logging.getLogger(name).level for name in loggers()}
    with running(engine) as listeners:
        yield listeners.url
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(autouse=True)
def loops_may_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that does other things, too, a test is not about the check of the event loop."""
    monkeypatch.setattr(appstate, "LoopMonitor", partial(LoopMonitor, allowed=60.0))


@pytest.fixture
async def client(launch: Launch) -> httpx.AsyncClient:
    """A client of the application with the default context."""
    return await launch()


@pytest.fixture
def eventually() -> Eventually:
    """Polls until a condition holds; fails after a deadline that no healthy run comes near."""

    async def wait(condition: Callable[[], Awaitable[bool]], *, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not await condition():
            assert time.monotonic() < deadline, f"the condition did not come about within {seconds:g} s"
            await asyncio.sleep(0.005)

    return wait
