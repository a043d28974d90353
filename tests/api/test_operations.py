from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tests.api.conftest import Eventually
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import make_ranks, store_keys

from kvstow.config import EngineConfig
from kvstow.control.administration import Sweep
from kvstow.control.engine import OffloadEngine
from kvstow.errors import ConflictError, NotFoundError, QueueFullError
from kvstow_api.answers import OperationView, RemovedView
from kvstow_api.journal import Journal
from kvstow_api.operations import MAX_RUNNING, Operation, Operations

pytestmark = pytest.mark.anyio

DEADLINE = 60.0


class FakeSweep(Sweep):
    """A sweep whose next step comes when the test allows it; `allow` may be set for all steps."""

    def __init__(self, steps: int = 3, error: BaseException | None = None, waiting: bool = False) -> None:
        super().__init__("purge", steps, 64, lambda sweep: iter(()))
        self.waiting = waiting
        self.asked = 0
        self.allow = threading.Event()
        self._error = error

    def step(self) -> bool:
        self.asked += 1
        assert self.allow.wait(DEADLINE)
        if self._error:
            raise self._error
        if not self.waiting:
            self.done += 1
            self.evicted_slots += 1
        return self.done < self.total

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def operations(clock: FakeClock) -> AsyncIterator[Operations]:
    operations = Operations(clock, Journal())
    yield operations
    await operations.close()


def run(operations: Operations, sweep: FakeSweep) -> Operation:
    sweep.allow.set()
    return operations.start("evict", "host", lambda: sweep)


async def ended(operation: Operation) -> OperationView:
    view = await operation.wait(DEADLINE)
    assert view.state != "running"
    return view


async def test_who_only_looks_does_not_wait(operations: Operations) -> None:
    sweep = FakeSweep()
    operation = operations.start("evict", "host", lambda: sweep)
    with pytest.raises(StopIteration) as answered:
        operation.wait(0).send(None)
    assert answered.value.value.state == "running"
    sweep.allow.set()
    await ended(operation)


async def test_what_a_sweep_raises_is_logged_and_ends_the_operation(
    operations: Operations, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "kvstow.api"):
        view = await ended(run(operations, FakeSweep(error=RuntimeError("secret"))))
    assert (view.state, view.error, view.result) == ("failed", "internal error (RuntimeError)", None)
    assert view.id in caplog.text
    assert "secret" in caplog.text
    assert operations.ended["evict", "failed"] == 1


async def test_an_error_of_the_engine_is_kept_in_its_words(operations: Operations) -> None:
    operation = run(operations, FakeSweep(error=ConflictError("not now")))
    assert (await ended(operation)).error == "not now"
    assert isinstance(operation.failure, ConflictError)


async def test_even_an_exit_cannot_end_an_operation_unseen(operations: Operations) -> None:
    assert (await ended(run(operations, FakeSweep(error=SystemExit())))).state == "failed"


async def test_a_cancelled_operation_keeps_what_was_done(operations: Operations) -> None:
    sweep = FakeSweep(3)
    operation = operations.start("purge", "host", lambda: sweep, dry_run=True)
    operation.cancel()
    sweep.allow.set()
    view = await ended(operation)
    assert (view.state, view.progress.done) == ("cancelled", 1)
    assert view.result == RemovedView(evicted_slots=1, evicted_bytes=64, dry_run=True)
    assert sweep.cancelled
    operation.cancel()
    assert operation.view.state == "cancelled"


async def has_asked(sweep: FakeSweep) -> bool:
    return sweep.asked > 5


async def test_a_sweep_that_waits_is_asked_again_without_spinning(
    operations: Operations, eventually: Eventually
) -> None:
    sweep = FakeSweep(1, waiting=True)
    started = time.monotonic()
    operation = run(operations, sweep)
    await eventually(partial(has_asked, sweep))
    assert sweep.asked <= (time.monotonic() - started) / 0.01 + 2
    assert operation.view.waiting
    sweep.waiting = False
    view = await ended(operation)
    assert (view.state, view.waiting) == ("succeeded", False)


async def test_only_one_resize_runs_at_a_time(operations: Operations) -> None:
    sweep = FakeSweep()
    operation = operations.start("resize", "host", lambda: sweep)
    with pytest.raises(ConflictError, match="resize is running"):
        operations.start("resize", "host", lambda: pytest.fail("a second sweep was made"))
    await ended(run(operations, FakeSweep()))
    sweep.allow.set()
    await ended(operation)
    again = FakeSweep()
    again.allow.set()
    assert (await ended(operations.start("resize", "host", lambda: again))).state == "succeeded"


async def test_only_so_many_run_at_a_time(operations: Operations) -> None:
    sweeps = [FakeSweep() for _ in range(MAX_RUNNING)]
    running = [operations.start("evict", "host", lambda sweep=sweep: sweep) for sweep in sweeps]  # type: ignore[misc]
    with pytest.raises(QueueFullError):
        operations.start("evict", "host", FakeSweep)
    for sweep in sweeps:
        sweep.allow.set()
    for operation in running:
        await ended(operation)
    await ended(run(operations, FakeSweep()))


def refuse() -> FakeSweep:
    raise ConflictError("no")


async def test_a_sweep_that_cannot_be_made_leaves_no_operation(operations: Operations) -> None:
    with pytest.raises(ConflictError):
        operations.start("resize", "host", refuse)
    assert operations.all() == []
    assert operations.num_running("resize") == 0


async def test_the_last_200_are_kept_newest_first(operations: Operations) -> None:
    ids = [(await ended(run(operations, FakeSweep(1)))).id for _ in range(203)]
    assert [operation.view.id for operation in operations.all()] == ids[:2:-1]
    with pytest.raises(NotFoundError):
        operations.get(ids[0])


async def test_what_ended_is_forgotten_after_an_hour_and_what_runs_is_not(
    operations: Operations, clock: FakeClock
) -> None:
    old = await ended(run(operations, FakeSweep(1)))
    slow = FakeSweep()
    running = operations.start("evict", "host", lambda: slow)
    clock.advance(3600.0)
    assert operations.get(old.id).view is old
    clock.advance(1.0)
    assert operations.all() == [running]
    slow.allow.set()
    await ended(running)


async def test_closing_cancels_what_runs_and_starts_nothing_more(clock: FakeClock) -> None:
    operations = Operations(clock, Journal())
    operation = run(operations, FakeSweep(1, waiting=True))
    await operations.close()
    await operations.close()
    assert operation.view.state == "cancelled"
    with pytest.raises(ConflictError, match="stopping"):
        operations.start("evict", "host", FakeSweep)


async def test_closing_cancels_all_operations_before_it_waits_and_lets_others_be_forgotten(clock: FakeClock) -> None:
    operations = Operations(clock, Journal())
    slow, waiting = FakeSweep(2), FakeSweep(1, waiting=True)
    stepping = operations.start("evict", "host", lambda: slow)
    over, second = run(operations, FakeSweep(1)), run(operations, waiting)
    await ended(over)
    closing = asyncio.create_task(operations.close())
    try:
        await ended(second)
        operations.forget(over.view.id)
    finally:
        slow.allow.set()
        await closing
    assert [stepping.view.state, second.view.state] == ["cancelled", "cancelled"]


async def test_a_sweep_whose_thread_cannot_start_is_cancelled(
    operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a resize would stay under way for good."""
    engine = OffloadEngine(EngineConfig(slot_bytes=64, capacity_slots=4))
    store_keys(engine, make_ranks(engine), [b"a", b"b", b"c", b"d"])
    lease = engine.acquire([b"a", b"b", b"c", b"d"])

    async def fail(step: Callable[[], bool]) -> bool:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("kvstow_api.operations.run_in_threadpool", fail)
        assert (await ended(operations.start("resize", "host", lambda: engine.admin.resize(1)))).state == "failed"
    assert engine.stats().pool.usable_slots == 4
    engine.release_lease(lease)
    view = await ended(operations.start("resize", "host", lambda: engine.admin.resize(2)))
    assert view.state == "succeeded"


@pytest.mark.parametrize("what", ["started", "progress"])
async def test_a_sweep_whose_operation_fails_is_cancelled(
    operations: Operations, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(view: OperationView, **changes: Any) -> OperationView:
        if what in changes:
            raise MemoryError
        return replace(view, **changes)

    monkeypatch.setattr("kvstow_api.operations.replace", fail)
    sweep = FakeSweep(3)
    assert (await ended(run(operations, sweep))).state == "failed"
    assert sweep.cancelled
