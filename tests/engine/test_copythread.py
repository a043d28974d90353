from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.doubles.fakes import FakeClock, FakeDevice, FakeTicket
from tests.waiting import eventually

from kvstow import copythread
from kvstow.copythread import CopyThread
from kvstow.devices.base import TicketState
from kvstow.errors import CopyError
from kvstow.messages import Completion, Direction, Op


class CountingClock(FakeClock):
    """Counts how often it is read."""

    reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return super().__call__()


class Harness:
    """A copy thread over a fake device. Slots are of 100 bytes."""

    def __init__(self) -> None:
        self.device, self.clock, self.failed = FakeDevice(), CountingClock(), threading.Event()
        self.held: list[int] = []
        self.copies = CopyThread("kvstow-copy-test", self.device, self.hold, 100, 100, self.clock, self.failed.set)
        self.seen: list[Completion] = []

    def hold(self, end_slot: int) -> ExitStack:
        self.held.append(end_slot)
        held = ExitStack()
        held.callback(self.held.remove, end_slot)
        return held

    def submit(self, *op_ids: int, direction: Direction = "store") -> None:
        self.copies.submit([Op(op_id, direction, (op_id,), (op_id,)) for op_id in op_ids], None)

    def completions(self, count: int) -> list[Completion]:
        """The next `count` completions, in order."""
        while len(self.seen) < count:
            assert self.copies.wait_completions(10), f"only {self.seen}"
            self.seen += self.copies.take_completions()
        taken, self.seen = self.seen[:count], self.seen[count:]
        return taken


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.copies.close(0)


def test_a_store_reports_when_its_blocks_are_free_and_when_it_is_done(harness: Harness) -> None:
    harness.submit(1)
    ticket = harness.device.ticket(1)
    ticket.free_source()
    assert harness.completions(1) == [Completion(1, "source_free")]
    assert harness.held == [2], "its slot is still written"
    ticket.finish(seconds=0.25)
    assert harness.completions(1) == [Completion(1, "done", None, 100, 0.25, 0.0)]


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("end", ["done", "failed", "closed"])
def test_the_memory_of_an_op_is_held_until_it_is_complete(harness: Harness, direction: Direction, end: str) -> None:
    harness.submit(7, direction=direction)
    ticket = harness.device.ticket(7)
    assert harness.held == [8]
    if end == "closed":
        harness.copies.close(0)
    else:
        ticket.finish() if end == "done" else ticket.fail(CopyError("injected"))
    assert harness.completions(1)[0].mark == ("done" if end == "done" else "failed")
    assert harness.held == []


@pytest.mark.parametrize("direction", ["load", "store"])
def test_an_op_that_cannot_be_launched_holds_nothing_and_the_next_one_runs(
    harness: Harness, direction: Direction
) -> None:
    harness.device.launch_error = CopyError("no")
    harness.submit(7, direction=direction)
    assert harness.completions(1)[0].mark == "failed"
    assert harness.held == []
    harness.submit(8, direction=direction)
    harness.device.ticket(8).finish()
    assert harness.completions(1)[0].mark == "done"


def test_a_store_that_is_done_at_once_reports_only_done(harness: Harness) -> None:
    harness.submit(1, 2)
    for op_id in (1, 2):
        harness.device.ticket(op_id).finish()
    assert {(c.op_id, c.mark) for c in harness.completions(2)} == {(1, "done"), (2, "done")}
    assert not harness.copies.wait_completions(0)


def test_at_most_two_ops_of_a_direction_run_and_the_other_direction_is_not_delayed(harness: Harness) -> None:
    harness.submit(1, 2, 3)
    harness.submit(11, 12, 13, direction="load")
    harness.device.ticket(12)
    assert set(harness.device.begun) == {1, 2, 11, 12}
    statistics = harness.copies.statistics()
    assert (statistics.pending_ops, statistics.queued_stores, statistics.queued_loads) == (6, 1, 1)
    harness.device.ticket(2).finish()
    harness.device.ticket(3)
    assert set(harness.device.begun) == {1, 2, 3, 11, 12}
    assert harness.completions(1)[0].op_id == 2
    assert harness.copies.statistics().pending_ops == 5


def test_in_one_turn_loads_begin_before_stores(harness: Harness) -> None:
    """A request waits for a load, and nothing waits for a store."""
    ops = [Op(1, "store", (1,), (1,)), Op(2, "store", (2,), (2,)), Op(3, "load", (3,), (3,)), Op(4, "load", (4,), (4,))]
    harness.copies.submit(ops, None)
    harness.device.ticket(2)
    assert harness.device.begun == (3, 4, 1, 2)


def test_waiting_for_room_counts_as_queue_time(harness: Harness) -> None:
    harness.submit(1, 2, 3)
    first = harness.device.ticket(1)
    harness.device.ticket(2)
    harness.clock.advance(3.0)
    first.finish()
    harness.device.ticket(3).finish()
    assert [c.queue_seconds for c in harness.completions(2)] == [0.0, 3.0]


def test_an_op_that_fails_on_the_device_or_at_its_start_does_not_stop_the_next(harness: Harness) -> None:
    harness.device.launch_error = ValueError("no such block")
    harness.submit(1, 2, 3)
    harness.device.ticket(2).fail(OSError("link down"))
    harness.device.ticket(3).finish()
    by_id = {completion.op_id: completion for completion in harness.completions(3)}
    assert (by_id[1].mark, by_id[1].error) == ("failed", "ValueError: no such block")
    assert (by_id[2].mark, by_id[2].error) == ("failed", "OSError: link down")
    assert by_id[3].mark == "done"
    assert harness.copies.failure is None


def test_totals_count_done_ops_by_direction(harness: Harness) -> None:
    harness.submit(1, 2)
    harness.submit(3, direction="load")
    harness.device.ticket(1).finish(1.5)
    harness.device.ticket(2).fail(OSError("no"))
    harness.device.ticket(3).finish(0.5)
    harness.completions(3)
    totals = harness.copies.statistics()
    assert (totals.store_bytes_total, totals.store_busy_seconds) == (100, 1.5)
    assert (totals.load_bytes_total, totals.load_busy_seconds) == (100, 0.5)


def test_the_end_of_the_thread_fails_every_op_and_is_reported(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.submit(1, 2, 3)
    harness.device.ticket(2)
    harness.device.ticket(1).poll_error = RuntimeError("a defect")
    failed = harness.completions(3)
    reason = "DataPlaneFailedError: the copy thread has failed: RuntimeError('a defect')"
    assert {c.op_id for c in failed} == {1, 2, 3}
    assert {(c.mark, c.error) for c in failed} == {("failed", reason)}
    assert harness.failed.wait(60)
    assert harness.copies.failure == reason.removeprefix("DataPlaneFailedError: ")
    assert harness.device.closed, "nothing moves bytes any more"
    assert "RuntimeError: a defect" in caplog.text
    harness.submit(4)
    assert harness.completions(1) == [Completion(4, "failed", reason)]
    assert harness.copies.statistics().pending_ops == 0


@pytest.mark.parametrize("is_driven", [False, True])
def test_a_device_in_an_unknown_state_is_closed_before_its_ops_fail(is_driven: bool, harness: Harness) -> None:
    harness.submit(1)
    harness.device.ticket(1)
    harness.device.advance_error = MemoryError("no room for a list")
    while is_driven and not harness.failed.is_set():
        harness.copies.drive()
    (failed,) = harness.completions(1)
    assert (failed.mark, harness.device.closed) == ("failed", True)
    assert "MemoryError('no room for a list')" in str(failed.error)
    eventually(harness.failed.is_set)


def test_after_an_error_the_device_is_not_called_again(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host drives just as the thread fails; the state of the device is unknown then."""
    calls: list[str] = []

    def advance() -> None:
        calls.append("advance")
        raise MemoryError("no room for a list")

    driven = threading.Event()

    def log_failure(*_: object) -> None:
        harness.copies.drive()
        driven.set()

    monkeypatch.setattr("kvstow.copythread.logger.exception", log_failure)
    monkeypatch.setattr(harness.device, "advance", advance)
    harness.submit(1)
    assert harness.completions(1)[0].mark == "failed"
    assert driven.is_set()
    assert calls == ["advance"]


def test_a_signal_that_interrupts_a_host_while_it_drives_reaches_it_and_ends_the_thread(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.current_thread()

    def advance() -> None:
        if threading.current_thread() is main:
            raise SystemExit

    def drive_until_it_has_the_turn() -> None:
        while True:
            harness.copies.drive()

    monkeypatch.setattr(harness.device, "advance", advance)
    harness.submit(1)
    harness.device.ticket(1)
    with pytest.raises(SystemExit):
        drive_until_it_has_the_turn()
    assert harness.completions(1)[0].mark == "failed"
    assert harness.device.closed


def test_an_op_that_cannot_be_queued_for_lack_of_memory_fails_alone(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = copythread.PendingOp

    def make(op: Op, *rest: Any) -> Any:
        if op.op_id == 2:
            raise MemoryError("no room")
        return queued(op, *rest)

    monkeypatch.setattr(copythread, "PendingOp", make)
    harness.submit(1, 2, 3)
    assert harness.completions(1) == [Completion(2, "failed", "MemoryError: no room")]
    assert harness.device.ticket(3)


def test_running_ops_fail_only_after_the_device_was_closed(harness: Harness) -> None:
    seen_at_close: list[bool] = []
    close = harness.device.close

    def watched_close() -> None:
        seen_at_close.append(harness.copies.wait_completions(0))
        close()

    harness.device.close = watched_close  # type: ignore[method-assign]
    harness.submit(1)
    harness.device.ticket(1)
    harness.copies.close(0)
    assert seen_at_close == [False]
    assert harness.completions(1)[0].mark == "failed"


def test_closing_lets_running_ops_finish_and_fails_the_queued_ones(harness: Harness) -> None:
    harness.submit(1, 2, 3)
    harness.device.ticket(2)
    closing = threading.Thread(target=harness.copies.close, args=(10,))
    closing.start()
    assert harness.completions(1) == [
        Completion(3, "failed", "DataPlaneFailedError: the data plane was closed before the op began"),
    ]
    for op_id in (1, 2):
        harness.device.ticket(op_id).finish()
    closing.join(60)
    assert [c.mark for c in harness.completions(2)] == ["done", "done"]
    assert harness.device.closed


def test_closing_fails_ops_that_are_not_finished_in_time_and_later_ones(harness: Harness) -> None:
    harness.submit(1)
    harness.device.ticket(1)
    assert harness.copies.close(0)
    assert harness.copies.close(0), "a second time"
    harness.submit(2)
    assert [(c.op_id, c.mark, c.error) for c in harness.completions(2)] == [
        (1, "failed", "DataPlaneFailedError: the data plane was closed while the op ran"),
        (2, "failed", "DataPlaneFailedError: the data plane is closed"),
    ]


def test_a_device_that_does_not_close_is_logged_and_delays_nothing(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.device.close_error = OSError("busy")
    harness.submit(1)
    harness.device.ticket(1)
    assert harness.copies.close(0)
    assert "the device did not close" in caplog.text
    assert harness.completions(1)[0].mark == "failed"


def test_an_idle_thread_does_not_spin(harness: Harness) -> None:
    harness.submit(1)
    harness.device.ticket(1).finish()
    harness.completions(1)
    reads = harness.clock.reads
    assert not harness.copies.wait_completions(0.05)
    assert harness.clock.reads <= reads + 1, "each turn reads the clock, and only the turn under way is not over"


# -- a host that drives the copies ----------------------------------------------------------------------------


class PollWitness:
    """Notes which threads poll a ticket."""

    def __init__(self, ticket: FakeTicket) -> None:
        self.threads: set[int] = set()
        self._poll = ticket.poll
        ticket.poll = self  # type: ignore[method-assign]

    def __call__(self) -> TicketState:
        self.threads.add(threading.get_ident())
        return self._poll()


def test_a_host_advances_the_copies_on_its_own_thread(harness: Harness) -> None:
    harness.submit(1)
    witness = PollWitness(harness.device.ticket(1))

    def driven() -> bool:
        harness.copies.drive()
        return threading.get_ident() in witness.threads

    eventually(driven)


def test_a_copy_that_the_host_finds_done_is_reported_once(harness: Harness) -> None:
    harness.submit(1)
    harness.device.ticket(1).finish()
    harness.copies.drive()
    assert [completion.mark for completion in harness.completions(1)] == ["done"]
    harness.copies.drive()
    assert not harness.copies.wait_completions(0)


def test_a_host_does_not_wait_for_a_thread_that_has_the_turn(harness: Harness) -> None:
    entered, leave = threading.Event(), threading.Event()
    begin = harness.device.launch_store

    def slow_begin(*arguments: Any) -> FakeTicket:
        entered.set()
        assert leave.wait(60)
        return begin(*arguments)

    harness.device.launch_store = slow_begin  # type: ignore[method-assign, assignment]
    harness.submit(1)
    assert entered.wait(60)
    host = threading.Thread(target=harness.copies.drive)
    host.start()
    host.join(60)
    stuck = host.is_alive()
    leave.set()
    assert not stuck


def test_a_host_that_drives_is_interrupted_less_often(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float | None] = [None]
    wait_for = threading.Condition.wait_for

    def noted(work: threading.Condition, is_over: Callable[[], bool], timeout: float | None = None) -> bool:
        if threading.current_thread().name == "kvstow-copy-test":
            pauses.append(timeout)
        return wait_for(work, is_over, timeout)

    monkeypatch.setattr(threading.Condition, "wait_for", noted)
    harness.submit(1)
    harness.device.ticket(1)
    eventually(lambda: pauses[-1] == 0.2e-3)
    harness.copies.drive()
    eventually(lambda: pauses[-1] == 1e-3)
    harness.clock.advance(1)
    eventually(lambda: pauses[-1] == 0.2e-3)


def test_an_error_during_drive_ends_the_thread_and_not_the_host(harness: Harness) -> None:
    harness.submit(1)
    ticket, host = harness.device.ticket(1), threading.get_ident()

    def poll() -> TicketState:
        if threading.get_ident() == host:
            raise RuntimeError("a defect")
        return TicketState.PENDING

    ticket.poll = poll  # type: ignore[method-assign]

    def failed() -> bool:
        harness.copies.drive()
        return harness.failed.is_set()

    eventually(failed)
    assert [completion.mark for completion in harness.completions(1)] == ["failed"]
    assert "a defect" in str(harness.copies.failure)


def test_nothing_is_driven_after_the_end(harness: Harness) -> None:
    harness.copies.close(0)
    harness.device.launch_error = RuntimeError("the device is closed")
    harness.submit(1)
    harness.copies.drive()
    assert harness.device.launch_error is not None


def test_an_op_that_was_given_up_ends_without_the_device(harness: Harness) -> None:
    harness.copies.submit([Op(1, "load", (), ())], None)
    assert harness.completions(1) == [Completion(1, "done")]
    assert harness.held == []
