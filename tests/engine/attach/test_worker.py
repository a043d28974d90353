from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.doubles.fakes import FakeClock
from tests.engine.attach.fakeservice import FakeService
from tests.waiting import eventually

from kvstow.attach.calls import (
    Desired,
    ExtentSlots,
    GrantedExtents,
    RegisteredExtents,
    ReleasedExtents,
    Report,
)
from kvstow.attach.channel import Frame
from kvstow.attach.connection import Answer
from kvstow.attach.hello import Hello, SessionTicket, Welcome, unique_id
from kvstow.attach.opgate import OpGate
from kvstow.attach.rankreports import GAP_SECONDS, REPORT_SECONDS, RankReports
from kvstow.attach.wire import MOST_LISTED, Kind
from kvstow.attach.worker import AttachedWorker
from kvstow.errors import AttachError, PinError
from kvstow.messages import DesiredState, Op, RankReport


class Wire:
    """A connection that keeps what is said."""

    problem = None

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.calls: list[Answer[Any]] = []

    def send(self, message: Any) -> bool:
        self.said.append(message)
        return True

    def call(self, message: Any) -> Answer[Any]:
        self.said.append(message)
        self.calls.append(Answer())
        return self.calls[-1]

    def taken(self) -> list[Any]:
        said, self.said = self.said, []
        return said


class Rank:
    """A pool and its data plane."""

    rank = pending_ops = 0
    boot_id = "boot"
    layered = launched = drive = begin_step = end_step = None

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.released: list[int] = []
        self.applied: list[DesiredState] = []
        self.revoked: list[int] = []
        self.said: list[str] = []
        self.error: PinError | None = None

    def grant(self, slot_stride: int, grants: Sequence[Any], fds: Sequence[int]) -> None:
        self.said.append("grant")
        if self.error is not None:
            raise self.error

    def drop_earlier(self) -> None:
        self.said.append("drop earlier")

    def revoke(self, extent_ids: Iterable[int]) -> None:
        self.revoked += extent_ids

    def registered_slots(self) -> list[tuple[int, int]]:
        return list(self.registered.items())

    def take_released(self) -> list[int]:
        released, self.released = self.released, []
        return released

    def report(self) -> RankReport:
        return RankReport.without_pool(0, "boot", "ready", 4096)

    def add_listener(self, listener: object) -> None: ...

    def start(self, *, at_ease: bool) -> None: ...

    def close(self, timeout: float) -> bool:
        return True

    def apply(self, desired: DesiredState) -> None:
        self.applied.append(desired)


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def reports(rank: Rank, wire: Wire, clock: FakeClock) -> RankReports:
    connection: Any = wire
    either: Any = rank
    return RankReports(connection, either, either, clock)


def test_the_first_slots_are_told_at_once_and_later_ones_after_a_gap(
    reports: RankReports, rank: Rank, wire: Wire, clock: FakeClock
) -> None:
    assert reports.send_due() == REPORT_SECONDS
    assert [type(message) for message in wire.taken()] == [Report]
    rank.registered = {1: 10}
    reports.is_changed = True
    reports.send_due()
    assert wire.taken() == [RegisteredExtents((ExtentSlots(1, 10),))]
    rank.registered = {1: 30, 2: 5}
    reports.is_changed = True
    assert reports.send_due() == pytest.approx(GAP_SECONDS)
    assert wire.taken() == []
    clock.advance(GAP_SECONDS)
    assert reports.send_due() == pytest.approx(REPORT_SECONDS - GAP_SECONDS)
    assert wire.taken() == [RegisteredExtents((ExtentSlots(1, 30), ExtentSlots(2, 5)))]


def test_many_extents_are_told_in_several_messages(reports: RankReports, rank: Rank, wire: Wire) -> None:
    rank.registered = dict.fromkeys(range(MOST_LISTED + 1), 1)
    reports.send_due()
    told = [message.extents for message in wire.taken() if isinstance(message, RegisteredExtents)]
    assert [len(extents) for extents in told] == [MOST_LISTED, 1]
    assert [extent for extents in told for extent, _ in extents] == list(range(MOST_LISTED + 1))


def test_it_reports_every_second(reports: RankReports, wire: Wire, clock: FakeClock) -> None:
    reports.send_due()
    wire.taken()
    clock.advance(REPORT_SECONDS / 2)
    assert reports.send_due() == REPORT_SECONDS / 2
    assert wire.taken() == []
    clock.advance(REPORT_SECONDS / 2)
    reports.send_due()
    assert [type(message) for message in wire.taken()] == [Report]


def test_fewer_slots_and_the_applied_state_are_said_before_it_lets_go(
    reports: RankReports, rank: Rank, wire: Wire, clock: FakeClock
) -> None:
    rank.registered = {1: 10, 2: 10}
    reports.send_due()
    wire.taken()
    clock.advance(GAP_SECONDS)
    rank.registered, rank.released = {1: 10}, [2]
    reports.is_changed = True
    reports.send_due()
    assert [type(message) for message in wire.taken()] == [Report, ReleasedExtents]
    clock.advance(GAP_SECONDS)
    rank.registered, rank.released = {1: 0}, [7]
    reports.is_changed = True
    reports.send_due()
    assert [type(message) for message in wire.taken()] == [RegisteredExtents, Report, ReleasedExtents]


def test_the_answer_to_a_report_is_applied(reports: RankReports, rank: Rank, wire: Wire) -> None:
    reports.send_due()
    desired = Desired(DesiredState("engine", 5, number=3))
    reports.apply_answers()
    assert rank.applied == []
    wire.calls[-1].resolve(Frame(Kind.DESIRED, 1, desired.pack()))
    reports.apply_answers()
    reports.apply_answers()
    assert rank.applied == [desired.desired]


def test_an_answer_of_another_kind_ends_the_session(reports: RankReports, wire: Wire) -> None:
    reports.send_due()
    wire.calls[-1].resolve(Frame(Kind.FOUND, 1, b""))
    with pytest.raises(AttachError):
        reports.apply_answers()


def test_grants_of_a_session_that_has_ended_change_nothing(rank: Rank, tmp_path: Path) -> None:
    """They arrive with the end of the connection, which the worker notices first, as it sends a report."""
    has_begun, may_report = threading.Event(), threading.Event()

    def report() -> RankReport:
        if service.channel is not None:  # and not for the hello
            has_begun.set()
            assert may_report.wait(30)
        return RankReport.without_pool(0, "boot", "ready", 4096)

    either: Any = rank
    rank.report = report  # type: ignore[method-assign]
    service = FakeService(tmp_path / "socket")
    worker = AttachedWorker(tmp_path / "socket", either, either, engine="engine")
    try:
        worker.join(SessionTicket(1, "token"))
        worker.start()
        accept(service)
        service.send(Welcome(session_id="1", service="test"))
        assert has_begun.wait(30)
        service.send(GrantedExtents(4096, (), True))
        service.hang_up()
        may_report.set()
        assert accept(service).is_farewell
        assert rank.said == []
    finally:
        may_report.set()
        worker.close()
        service.close()


def accept(service: FakeService) -> Hello:
    found: list[Hello] = []

    def has_come() -> bool:
        with suppress(BlockingIOError):
            found.append(service.accept())
        return bool(found)

    eventually(has_come)
    return found[0]


def test_a_load_that_takes_long_to_start_locks_nobody_out_and_the_gate_is_not_quiet_meanwhile() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def load(ops: Sequence[Op], after: object) -> None:
        has_begun.set()
        assert may_end.wait(30)

    plane: Any = SimpleNamespace(pending_ops=0, layered=SimpleNamespace(load=load), take_completions=list)
    gate = OpGate(plane, stores=True)
    gate.open(1)
    loading = threading.Thread(target=gate.load, args=((Op(unique_id(1, 1), "load", (1,), (1,)),), None))
    shutting = threading.Thread(target=gate.shut)
    loading.start()
    assert has_begun.wait(30)
    shutting.start()
    shutting.join(10)
    was_shut = not shutting.is_alive()
    was_quiet = was_shut and gate.is_quiet()  # if it is not shut, the load has the lock
    may_end.set()
    loading.join()
    shutting.join()
    assert (was_shut, was_quiet, gate.is_quiet()) == (True, False, True)
