from __future__ import annotations

import logging
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import ready_report
from tests.waiting import eventually

from kvstow.attach.calls import Desired, Report
from kvstow.attach.channel import Channel
from kvstow.attach.hello import CallError
from kvstow.attach.wire import Kind
from kvstow.errors import DisconnectedError
from kvstow.messages import DesiredState, RankReport, RankState
from kvstow_service.admin.agent import AdminAddress, FindEngine, RankAgent

LONG = 3600.0  # an interval that no test waits for
WANTED = DesiredState("engine", 8, number=1)


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
        self.pinned = pinned
        self.wake()

    def wake(self) -> None:
        """Let the agent look at the rank, and at its clock."""
        assert self.callback is not None
        self.callback()


class FakeEngine:
    """Listens on a Unix socket, takes reports on a thread, and answers them with what a test sets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.desired: Any = Desired(WANTED)
        """The answer; None for none."""
        self.reports: list[RankReport] = []
        self.channel: Channel | None = None
        """The newest connection."""
        self._connected: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            self._connected, self.channel = connected, Channel(connected)
            connected.setblocking(True)
            try:
                while True:
                    for frame in self.channel.receive():
                        self.reports.append(Report.unpack(frame.payload).report)
                        if self.desired is not None:
                            self.channel.send(self.desired.KIND, self.desired.pack(), frame.request_id)
            except (DisconnectedError, OSError, ValueError):
                self.channel.close()

    def send(self, desired: DesiredState) -> None:
        """Send a change of the desired state."""
        assert self.channel is not None
        self.channel.send(Kind.DESIRED, Desired(desired).pack())

    def stop(self) -> None:
        """Idempotent."""
        self.path.unlink(missing_ok=True)
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._connected is not None:
            with suppress(OSError):  # the thread may have closed it, because the other end has
                self._connected.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)


@pytest.fixture
def rank() -> FakeRank:
    return FakeRank()


@pytest.fixture
def make_engine(tmp_path: Path, stack: ExitStack) -> Callable[[], FakeEngine]:
    def make() -> FakeEngine:
        engine = FakeEngine(tmp_path / "ranks")
        stack.callback(engine.stop)
        return engine

    return make


@pytest.fixture
def engine(make_engine: Callable[[], FakeEngine]) -> FakeEngine:
    return make_engine()


@pytest.fixture
def start(rank: FakeRank, stack: ExitStack, tmp_path: Path) -> Callable[..., RankAgent]:
    """Starts an agent that finds the engine's socket whenever it is there."""

    def there() -> Path | None:
        path = tmp_path / "ranks"
        return path if path.exists() else None

    def start_agent(find: FindEngine = there, **options: Any) -> RankAgent:
        agent = RankAgent(1, rank, find, **{"interval": LONG, **options})
        stack.callback(agent.stop)
        agent.start()
        return agent

    return start_agent


def test_the_first_report_is_sent_at_once_and_numbered(engine: FakeEngine, start: Any, rank: FakeRank) -> None:
    agent = start()
    eventually(lambda: agent.sent == 1)
    assert rank.applied == [WANTED]
    (report,) = engine.reports
    assert (report.rank, report.number, report.sender != "") == (1, 1, True)


def test_a_change_is_reported_at_once(engine: FakeEngine, start: Any, rank: FakeRank) -> None:
    start()
    eventually(lambda: rank.applied)
    rank.change(pinned=5)
    eventually(lambda: [report.pinned_slots for report in engine.reports] == [0, 5], "the second report")
    assert [report.number for report in engine.reports] == [1, 2]


def test_a_desired_state_that_the_engine_sends_is_applied_without_a_report(
    engine: FakeEngine, start: Any, rank: FakeRank
) -> None:
    agent = start()
    eventually(lambda: agent.sent)
    engine.send(DesiredState("engine", 3, number=2))
    eventually(lambda: rank.applied[1:] == [DesiredState("engine", 3, number=2)], "the change")
    assert (agent.sent, len(engine.reports)) == (1, 1)


def test_many_changes_share_few_reports(engine: FakeEngine, start: Any, rank: FakeRank) -> None:
    start(interval=0.5)
    for pinned in range(1, 1001):
        rank.change(pinned)
    eventually(lambda: engine.reports and engine.reports[-1].pinned_slots == 1000, "the last change")
    assert len(engine.reports) < 100


def test_only_a_little_more_memory_waits_for_the_next_report(engine: FakeEngine, start: Any, rank: FakeRank) -> None:
    rank.target = 1000
    start()
    eventually(lambda: engine.reports)
    news = [(1, None), (103, "no more"), (104, None)]
    for pinned, error in sorted([*news, (102, None), (999, None)], key=itemgetter(0)):
        looks = rank.looks
        rank.error = error
        rank.change(pinned)
        eventually(lambda looks=looks: rank.looks > looks)
    eventually(lambda: len(engine.reports) > len(news))
    assert [report.pinned_slots for report in engine.reports] == [0, *(pinned for pinned, _ in news)]


def test_a_report_waits_until_the_one_before_is_answered(engine: FakeEngine, start: Any, rank: FakeRank) -> None:
    """An engine that is late must not get a queue of them."""
    engine.desired, clock = None, FakeClock()
    agent = start(clock=clock)
    eventually(lambda: engine.reports)
    clock.advance(1.0)
    rank.change(1)
    for number in (2, 3):  # when the second one is applied, a turn has ended that began after the change
        engine.send(replace(WANTED, number=number))
        eventually(lambda: rank.applied and rank.applied[-1].number == number)  # noqa: B023 - called at once
    rank.change(3)
    assert engine.channel is not None
    engine.desired = Desired(WANTED)
    engine.channel.send(Kind.DESIRED, Desired(WANTED).pack(), 1)
    eventually(lambda: agent.sent >= 2)
    assert [report.pinned_slots for report in engine.reports[:2]] == [0, 3]


def test_an_engine_that_does_not_answer_is_a_failure_and_the_link_is_new(
    engine: FakeEngine, start: Any, rank: FakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    engine.desired, clock = None, FakeClock()
    agent = start(clock=clock, interval=0.01)
    eventually(lambda: engine.reports)
    first = engine.channel
    clock.advance(5.0)
    rank.wake()
    eventually(lambda: agent.failed == 1, "a failure")
    assert "rank 1: its report has failed, and is sent again: the engine has not answered within 5 s" in caplog.text
    engine.desired = Desired(WANTED)
    clock.advance(1.0)
    eventually(lambda: agent.sent == 1, "a report on another connection")
    assert engine.channel is not first


def test_an_unreachable_engine_is_retried_and_logged_once(
    engine: FakeEngine, make_engine: Any, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvstow.agent")
    agent = start(interval=0.01)
    eventually(lambda: agent.sent)
    engine.stop()
    eventually(lambda: agent.failed >= 3, "failures")
    assert agent.is_failing
    sent = agent.sent
    make_engine()
    eventually(lambda: agent.sent > sent, "reports after the engine came back")
    eventually(lambda: not agent.is_failing, "the agent to note it")
    messages = [record.getMessage() for record in caplog.records if "report" in record.getMessage()]
    assert [message.split(":")[1].split(" ")[1] for message in messages] == ["its", "reports"]


class Garbage:
    """An answer that is none."""

    KIND = Kind.DESIRED

    def pack(self) -> bytes:
        return b"\x80"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Garbage(), "desired state: Object missing required field `engine_id`"),
        (CallError("invalid_request", "another pool"), "another pool"),
        (Report(ready_report(1, 1)), "a frame of kind 48 came instead of a desired state"),
    ],
)
def test_an_answer_that_is_no_desired_state_is_a_failure_and_not_applied(
    engine: FakeEngine, start: Any, rank: FakeRank, caplog: Any, answer: Any, words: str
) -> None:
    engine.desired = answer
    agent = start(interval=0.01)
    eventually(lambda: agent.failed)
    assert rank.applied == []
    assert words in caplog.text


def test_the_thread_outlives_a_rank_that_raises(
    engine: FakeEngine, start: Any, rank: FakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.fails = True
    agent = start(interval=0.01)
    eventually(lambda: agent.failed >= 2)
    rank.fails = False
    eventually(lambda: rank.applied, "reports after the rank came to its senses")
    assert "RuntimeError: the rank is confused" in caplog.text


def test_a_change_of_the_ranks_state_is_logged_once(
    engine: FakeEngine, start: Any, rank: FakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvstow.agent")
    agent = start(interval=0.01)
    eventually(lambda: agent.sent >= 2)
    rank.error = "memlock is 64 KiB"
    eventually(lambda: engine.reports[-1].error)
    agent.stop()
    assert [(record.levelname, record.getMessage()) for record in caplog.records if "rank 1 is" in record.message] == [
        ("INFO", "rank 1 is pinning: 0 B of 32 KiB pinned (none)"),
        ("WARNING", "rank 1 is degraded: 0 B of 32 KiB pinned (none); memlock is 64 KiB"),
    ]


def test_stop_is_idempotent_and_ends_the_thread(engine: FakeEngine, start: Any) -> None:
    agent = start()
    agent.stop()
    agent.stop()
    eventually(lambda: not is_running())


def is_running() -> bool:
    return "kvstow-agent-1" in {thread.name for thread in threading.enumerate()}


def test_stop_does_not_wait_for_a_hanging_server_and_its_late_response_is_ignored(
    start: Any, rank: FakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        agent = start(lambda: None)
        agent.offer(AdminAddress(f"http://127.0.0.1:{listener.getsockname()[1]}", "secret"))
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1 << 16)
            agent.stop()
            assert is_running(), "the report is under way: nobody has waited for it"
            answer = Desired(WANTED).pack()
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
            eventually(lambda: not is_running())
    assert rank.applied == []
    assert caplog.records == []


def test_a_search_that_never_ends_does_not_delay_the_exit_of_the_process(child_environ: dict[str, str]) -> None:
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
    agent = RankAgent(1, rank, lambda: None)
    agent.stop()
    agent.stop()
    rank.change(1)


def test_the_agent_waits_silently_for_a_late_engine(
    make_engine: Any, rank: FakeRank, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    agent = start()
    eventually(lambda: rank.looks >= 2, "two searches")
    assert (agent.sent, agent.failed, agent.is_failing, rank.applied) == (0, 0, False, [])
    make_engine()
    eventually(lambda: rank.applied, "a report")
    assert agent.failed == 0
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_search_that_raises_is_a_failure_like_any_other(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    def find() -> Path | None:
        raise PermissionError("not for you")

    agent = start(find, interval=0.01)
    eventually(lambda: agent.failed >= 2, "failures")
    assert "rank 1: its report has failed, and is sent again: not for you" in caplog.text


# -- ranks on other hosts ----------------------------------------------------------------------------------------------


@dataclass
class FakeAdmin:
    """Takes reports over HTTP, and answers with the bytes and the status that a test sets."""

    answer: bytes = Desired(WANTED).pack()
    status: int = 200
    reports: list[RankReport] = field(default_factory=list)
    headers: set[tuple[str | None, str | None]] = field(default_factory=set)

    async def take(self, request: Request) -> Response:
        assert request.path_params["rank"] == "1"
        self.headers.add((request.headers.get("authorization"), request.headers.get("content-type")))
        self.reports.append(Report.unpack(await request.body()).report)
        return Response(self.answer, self.status)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/ranks/{rank}/report", self.take, methods=["POST"])])


@pytest.fixture
def admin() -> FakeAdmin:
    return FakeAdmin()


def test_a_rank_that_finds_no_engine_reports_to_the_offered_address(
    serving: Any, start: Any, rank: FakeRank, admin: FakeAdmin
) -> None:
    _, listeners = serving(admin.app())
    agent = start(lambda: None)
    for _ in range(2):
        agent.offer(AdminAddress(listeners.url, "secret"))
    eventually(lambda: agent.sent == 1, "a report long before the next one is due")
    assert rank.applied == [WANTED]
    assert admin.headers == {("Bearer secret", "application/msgpack")}
    rank.change(pinned=5)
    eventually(lambda: [report.pinned_slots for report in admin.reports] == [0, 5], "the second report")


def test_a_second_offered_address_replaces_the_first(serving: Any, start: Any, admin: FakeAdmin) -> None:
    another = FakeAdmin()
    (_, first), (_, second) = serving(admin.app()), serving(another.app())
    agent = start(lambda: None)
    for listeners, server in ((first, admin), (second, another)):
        agent.offer(AdminAddress(listeners.url, "secret"))
        eventually(lambda server=server: server.reports, "a report long before the next one is due")
    assert agent.failed == 0


def test_the_engine_on_this_host_is_preferred_to_an_offered_address(engine: FakeEngine, start: Any) -> None:
    agent = start()
    agent.offer(AdminAddress("http://127.0.0.1:1", "wrong"))
    eventually(lambda: agent.sent)
    assert (agent.failed, len(engine.reports) >= 1) == (0, True)


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (401, b'{"detail": "a token is needed"}', 'answers with status 401: {"detail": "a token is needed"}'),
        (200, b"\x80", "desired state: "),
        (200, b"x" * (1 << 17), "desired state: "),
    ],
)
def test_a_refused_report_and_a_malformed_answer_count_as_failed(
    serving: Any, start: Any, rank: FakeRank, caplog: Any, status: int, answer: bytes, words: str
) -> None:
    _, listeners = serving(FakeAdmin(answer, status).app())
    agent = start(lambda: None, interval=0.01)
    agent.offer(AdminAddress(listeners.url, "secret"))
    eventually(lambda: agent.failed)
    assert rank.applied == []
    assert words in caplog.text


def test_a_server_that_does_not_speak_http_counts_as_failed(start: Any, caplog: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        agent = start(lambda: None)
        agent.offer(AdminAddress(f"http://127.0.0.1:{listener.getsockname()[1]}", "secret"))
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")
            eventually(lambda: agent.failed, "a failure")
    assert "the admin server does not answer as HTTP demands" in caplog.text
    assert "Traceback" not in caplog.text


def test_an_address_is_picklable_and_its_repr_hides_the_token() -> None:
    address = AdminAddress("http://10.0.0.1:9595", "s3cret")
    assert pickle.loads(pickle.dumps(address)) == address
    assert "s3cret" not in f"{address!r} {address}"
