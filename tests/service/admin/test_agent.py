from __future__ import annotations

import json
import logging
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvstow.messages import DesiredState, RankReport, RankState
from kvstow.testing.rank import ready_report
from kvstow_service.admin.agent import AdminAddress, FindAdmin, RankAgent

LONG = 60.0  # an interval that no test waits for


@dataclass
class FakeRank:
    """A rank whose report and failures a test sets."""

    pinned: int = 0
    target: int = 8
    fails: bool = False
    error: str | None = None
    applied: list[DesiredState] = field(default_factory=list)
    callback: Callable[[], None] | None = None
    looks: int = 0

    def report(self) -> RankReport:
        self.looks += 1
        if self.fails:
            raise RuntimeError("the rank is confused")
        state: RankState = "degraded" if self.error else "pinning"
        pinned = self.pinned
        return ready_report(
            4096, self.target, rank=1, state=state, pinned_slots=pinned, pinned_bytes=pinned * 4096, error=self.error
        )

    def apply(self, desired: DesiredState) -> None:
        self.applied.append(desired)

    def add_listener(self, callback: Callable[[], None]) -> None:
        self.callback = callback

    def change(self, pinned: int) -> None:
        assert self.callback is not None
        self.pinned = pinned
        self.callback()


@dataclass
class FakeAdmin:
    """Takes reports, and answers with the desired state or the status that a test sets."""

    desired: dict[str, Any] = field(default_factory=lambda: DesiredState("engine", 8, number=1).to_json())
    status: int = 200
    reports: list[RankReport] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)

    async def take(self, request: Request) -> Response:
        assert request.path_params["rank"] == "1"
        self.tokens.add(request.headers.get("authorization"))
        self.reports.append(RankReport.from_json(await request.json()))
        return JSONResponse(self.desired, self.status)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/ranks/{rank}/report", self.take, methods=["POST"])])


@pytest.fixture
def rank() -> FakeRank:
    return FakeRank()


@pytest.fixture
def admin() -> FakeAdmin:
    return FakeAdmin()


@pytest.fixture
def start(rank: FakeRank) -> Iterator[Callable[..., RankAgent]]:
    agents: list[RankAgent] = []

    def start_agent(url: str | FindAdmin, *, uds: Path | None = None, interval: float = LONG) -> RankAgent:
        server = AdminAddress(url, "secret", uds) if isinstance(url, str) else url
        agents.append(RankAgent(1, rank, server, interval=interval))
        agents[-1].start()
        return agents[-1]

    yield start_agent
    for agent in agents:
        agent.stop()


def test_the_first_report_is_sent_at_once_with_the_token(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any
) -> None:
    _, listeners = serving(admin.app())
    agent = start(listeners.url)
    eventually(lambda: rank.applied, "the desired state at the rank")
    assert rank.applied == [DesiredState("engine", 8, number=1)]
    assert (admin.reports, admin.tokens) == ([rank.report()], {"Bearer secret"})
    eventually(lambda: agent.sent == 1)


def test_a_unix_socket_is_preferred(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any, tmp_path: Path
) -> None:
    uds = tmp_path / "admin.sock"
    serving(admin.app(), uds=uds)
    start("http://127.0.0.1:1", uds=uds)
    eventually(lambda: rank.applied, "a report over the Unix socket")


def test_a_change_is_reported_at_once(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any
) -> None:
    _, listeners = serving(admin.app())
    start(listeners.url)
    eventually(lambda: rank.applied)
    rank.change(pinned=5)
    eventually(lambda: [report.pinned_slots for report in admin.reports] == [0, 5], "the second report")


def test_reports_are_sent_without_a_change(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any
) -> None:
    _, listeners = serving(admin.app())
    start(listeners.url, interval=0.01)
    eventually(lambda: len(admin.reports) >= 3, "three beats")


def test_many_changes_share_few_reports(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any
) -> None:
    _, listeners = serving(admin.app())
    start(listeners.url, interval=0.5)
    for pinned in range(1, 1001):
        rank.change(pinned)
    eventually(lambda: admin.reports and admin.reports[-1].pinned_slots == 1000, "the last change")
    assert len(admin.reports) < 100


def test_only_a_little_more_memory_waits_for_the_next_report(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any
) -> None:
    _, listeners = serving(admin.app())
    rank.target = 1000
    start(listeners.url, interval=3600.0)
    eventually(lambda: admin.reports)
    news = [(1, None), (103, "no more"), (104, None)]
    for pinned, error in sorted([*news, (102, None), (999, None)], key=itemgetter(0)):
        looks = rank.looks
        rank.error = error
        rank.change(pinned)
        eventually(lambda looks=looks: rank.looks > looks)
    assert [report.pinned_slots for report in admin.reports] == [0, *(pinned for pinned, _ in news)]


def test_an_unreachable_server_is_retried_and_logged_once(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvstow.agent")
    server, listeners = serving(admin.app())
    agent = start(listeners.url, interval=0.01)
    eventually(lambda: agent.sent)
    server.stop()
    eventually(lambda: agent.failed >= 3, "failures")
    assert agent.is_failing
    sent = agent.sent
    serving(admin.app(), port=listeners.port)
    eventually(lambda: agent.sent > sent, "reports after the server came back")
    eventually(lambda: not agent.is_failing, "the agent to note it")
    messages = [record.getMessage() for record in caplog.records if "report" in record.getMessage()]
    assert [message.split(":")[1].split(" ")[1] for message in messages] == ["report", "reports"]


@pytest.mark.parametrize("desired", [{"engine_id": "e"}, {"engine_id": "e", "capacity_slots": -1}, []])
def test_a_malformed_response_is_not_applied(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any, desired: Any
) -> None:
    admin.desired = desired
    _, listeners = serving(admin.app())
    agent = start(listeners.url, interval=0.01)
    eventually(lambda: agent.failed)
    assert rank.applied == []


def test_a_refused_report_counts_as_failed(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any
) -> None:
    admin.status = 401
    _, listeners = serving(admin.app())
    agent = start(listeners.url, interval=0.01)
    eventually(lambda: agent.failed)
    assert rank.applied == []


def test_the_thread_outlives_a_rank_that_raises(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rank.fails = True
    _, listeners = serving(admin.app())
    agent = start(listeners.url, interval=0.01)
    eventually(lambda: agent.failed >= 2)
    rank.fails = False
    eventually(lambda: rank.applied, "reports after the rank came to its senses")
    assert "RuntimeError: the rank is confused" in caplog.text


def test_a_change_of_the_ranks_state_is_logged_once(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvstow.agent")
    _, listeners = serving(admin.app())
    agent = start(listeners.url, interval=0.01)
    eventually(lambda: agent.sent >= 2)
    rank.error = "memlock is 64 KiB"
    eventually(lambda: admin.reports[-1].error)
    agent.stop()
    assert [(record.levelname, record.getMessage()) for record in caplog.records if "rank 1 is" in record.message] == [
        ("INFO", "rank 1 is pinning: 0 B of 32 KiB pinned (none)"),
        ("WARNING", "rank 1 is degraded: 0 B of 32 KiB pinned (none); memlock is 64 KiB"),
    ]


def test_stop_is_idempotent_and_ends_the_thread(serving: Any, start: Any, admin: FakeAdmin, eventually: Any) -> None:
    _, listeners = serving(admin.app())
    agent = start(listeners.url)
    agent.stop()
    agent.stop()
    eventually(lambda: not is_running())


def is_running() -> bool:
    return "kvstow-agent-1" in {thread.name for thread in threading.enumerate()}


def test_stop_does_not_wait_for_a_hanging_server_and_its_late_response_is_ignored(
    start: Any, rank: FakeRank, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        agent = start(f"http://127.0.0.1:{listener.getsockname()[1]}")
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1 << 16)
            agent.stop()
            assert is_running(), "the beat is under way: nobody has waited for it"
            answer = json.dumps(DesiredState("engine", 8, number=1).to_json()).encode()
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
            eventually(lambda: not is_running())
    assert rank.applied == []
    assert caplog.records == []


def test_a_report_that_never_ends_does_not_delay_the_exit_of_the_process(child_environ: dict[str, str]) -> None:
    code = (
        "import threading; from types import SimpleNamespace; from kvstow_service.admin.agent import RankAgent\n"
        "looking = threading.Event()\n"
        "def find(): looking.set(); threading.Event().wait()\n"
        "report = SimpleNamespace(\n"
        "    state='pinning', error=None, notice=None, pinned_bytes=0, target_bytes=1, pin_mode='')\n"
        "rank = SimpleNamespace(report=lambda: report, add_listener=lambda callback: None)\n"
        "agent = RankAgent(0, rank, find); agent.start(); assert looking.wait(60); agent.stop(); print('ended')"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=child_environ, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "ended\n"


def test_an_agent_that_was_never_started_can_be_stopped(rank: FakeRank) -> None:
    RankAgent(1, rank, AdminAddress("http://127.0.0.1:1", "secret")).stop()


@dataclass
class Whereabouts:
    """Where the server is, as a test says; counts who asks."""

    address: AdminAddress | None = None
    asked: int = 0

    def __call__(self) -> AdminAddress | None:
        self.asked += 1
        return self.address


def test_the_agent_waits_silently_for_a_late_server(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    where = Whereabouts()
    agent = start(where, interval=0.01)
    eventually(lambda: where.asked >= 3, "three looks for the server")
    assert (agent.sent, agent.failed, agent.is_failing, rank.applied) == (0, 0, False, [])
    _, listeners = serving(admin.app())
    where.address = AdminAddress(listeners.url, "secret")
    eventually(lambda: rank.applied, "a report")
    assert agent.failed == 0
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_no_client_is_imported_before_there_is_a_server() -> None:
    """Its 0.3 s would fall into the host's own start."""
    code = (
        "import sys, threading; from types import SimpleNamespace; from kvstow_service.admin.agent import RankAgent\n"
        "looked = threading.Event()\n"
        "report = SimpleNamespace(\n"
        "    state='pinning', error=None, notice=None, pinned_bytes=0, target_bytes=1, pin_mode='')\n"
        "rank = SimpleNamespace(report=lambda: report, add_listener=lambda callback: None)\n"
        "agent = RankAgent(0, rank, lambda: looked.set())\n"
        "agent.start(); assert looked.wait(60); agent.stop(); assert agent.failed == 0\n"
        "print([name for name in ('httpx', 'kvstow_api.client') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_address_changed_triggers_a_search_at_once(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any
) -> None:
    where = Whereabouts()
    agent = start(where)
    eventually(lambda: where.asked)
    _, listeners = serving(admin.app())
    where.address = AdminAddress(listeners.url, "secret")
    agent.address_changed()
    eventually(lambda: rank.applied, "a report long before the next beat")


def test_an_offered_address_is_used_if_none_is_found(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any
) -> None:
    where = Whereabouts()
    agent = start(where)
    eventually(lambda: where.asked)
    _, listeners = serving(admin.app())
    for _ in range(2):
        agent.offer(AdminAddress(listeners.url, "secret"))
    eventually(lambda: rank.applied, "a report long before the next beat")


def test_a_second_offered_address_replaces_the_first(
    serving: Any, start: Any, admin: FakeAdmin, eventually: Any
) -> None:
    another = FakeAdmin()
    (_, first), (_, second) = serving(admin.app()), serving(another.app())
    agent = start(Whereabouts())
    for listeners, server in ((first, admin), (second, another)):
        agent.offer(AdminAddress(listeners.url, "secret"))
        eventually(lambda server=server: server.reports, "a report long before the next beat")
    assert agent.failed == 0


def test_a_found_address_is_preferred_to_an_offered_one(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any
) -> None:
    _, listeners = serving(admin.app())
    where = Whereabouts()
    agent = start(where)
    eventually(lambda: where.asked)
    where.address = AdminAddress(listeners.url, "secret")
    agent.offer(AdminAddress("http://127.0.0.1:1", "wrong"))
    eventually(lambda: rank.applied)
    assert (agent.failed, admin.tokens) == (0, {"Bearer secret"})


def test_a_server_that_disappears_is_a_failure(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server, listeners = serving(admin.app())
    where = Whereabouts(AdminAddress(listeners.url, "secret"))
    agent = start(where, interval=0.01)
    eventually(lambda: agent.sent)
    where.address = None
    server.stop()
    eventually(lambda: agent.failed >= 3)
    assert agent.is_failing
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    _, listeners = serving(admin.app())
    where.address = AdminAddress(listeners.url, "secret")
    eventually(lambda: not agent.is_failing, "reports to the new server")


def test_a_search_that_raises_is_a_failure_like_any_other(
    start: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def find() -> AdminAddress | None:
        raise PermissionError("not for you")

    agent = start(find, interval=0.01)
    eventually(lambda: agent.failed >= 2, "failures")
    assert "rank 1: report failed, will retry: not for you" in caplog.text


def test_an_address_is_picklable_and_its_repr_hides_the_token() -> None:
    address = AdminAddress("http://10.0.0.1:9595", "s3cret", Path("/run/admin.sock"))
    assert pickle.loads(pickle.dumps(address)) == address
    assert "s3cret" not in f"{address!r} {address}"
