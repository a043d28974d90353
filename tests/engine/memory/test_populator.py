from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import eventually

from kvstow.errors import ConfigError, PinError
from kvstow.memory import extents as populator_module
from kvstow.memory.extents import STEP_BYTES, Extent, Populator, Window
from kvstow.memory.limits import MemoryLimits

MIB, GIB = 1 << 20, 1 << 30

MakePopulator = Callable[..., Populator]
MakeExtent = Callable[[int], Extent]


class FakeWindow(Window):
    """Takes no memory. `go_on` is waited for in each call while it is clear; `failures` come first."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[Extent, int, int]] = []
        self.failures: list[Exception] = []
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def populate(self, extent: Extent, start: int, end: int, stop: Callable[[], bool]) -> int | None:
        self.entered.set()
        while not self.go_on.wait(0.001):
            if stop():
                return None
        if self.failures:
            raise self.failures.pop(0)
        self.ranges.append((extent, start, end))
        return 2 * MIB


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> FakeWindow:
    window = FakeWindow()
    monkeypatch.setattr(populator_module, "Window", lambda: window)
    return window


@pytest.fixture
def limits(tmp_path: Path) -> MemoryLimits:
    (tmp_path / "meminfo").write_text(f"MemAvailable: {1 << 30} kB\n")
    return MemoryLimits(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs")


@pytest.fixture
def make(limits: MemoryLimits) -> Iterator[MakePopulator]:
    made: list[Populator] = []

    def make(**given: object) -> Populator:
        populator = Populator(limits, **{"pause": 0.0, **given})  # type: ignore[arg-type]
        made.append(populator)
        populator.start()
        return populator

    yield make
    for populator in made:
        populator.close()


@pytest.fixture
def extent() -> Iterator[MakeExtent]:
    made: list[Extent] = []

    def make(num_bytes: int) -> Extent:
        made.append(Extent.create(num_bytes))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_extents_are_populated_in_the_order_of_adding_and_the_watermark_moves_in_steps(
    window: FakeWindow, make: MakePopulator, extent: MakeExtent
) -> None:
    one, other = extent(STEP_BYTES + 6 * MIB), extent(4 * MIB)
    populator = make(chunk_bytes=40 * MIB)
    marks: set[int] = set()
    populator.add_listener(lambda: marks.add(one.populated_bytes))
    populator.add(one)
    populator.add(other)
    eventually(lambda: populator.status().state == "ready")
    assert [(found is one, start // MIB, end // MIB) for found, start, end in window.ranges] == [
        (True, 0, 40),
        (True, 40, 64),
        (True, 64, 70),
        (False, 0, 4),
    ]
    assert marks == {0, STEP_BYTES, one.num_bytes}
    status = populator.status()
    assert status.populated_bytes == status.target_bytes == one.num_bytes + other.num_bytes
    assert status.small_page_bytes == 8 * MIB


def test_extents_of_a_row_take_turns_lower_rows_first_and_those_without_a_row_last(
    window: FakeWindow, make: MakePopulator, extent: MakeExtent
) -> None:
    spare, later, *ranks = (extent(2 * STEP_BYTES) for _ in range(5))
    for one in ranks:
        one.row = 0
    later.row = 1
    populator = make()
    populator.set_paused(True)
    for one in (spare, later, *ranks):
        populator.add(one)
    populator.set_paused(False)
    eventually(lambda: populator.status().state == "ready")
    first, second = (0, STEP_BYTES), (STEP_BYTES, 2 * STEP_BYTES)
    assert window.ranges == [
        *((one, *first) for one in ranks),
        *((one, *second) for one in ranks),
        *((one, *step) for one in (later, spare) for step in (first, second)),
    ]


def test_a_turn_is_a_whole_step_and_larger_extents_have_more_turns(
    window: FakeWindow, make: MakePopulator, extent: MakeExtent
) -> None:
    large, small = extent(2 * STEP_BYTES), extent(STEP_BYTES)
    populator = make(chunk_bytes=32 * MIB)
    populator.set_paused(True)
    for one in (large, small):
        one.row = 0
        populator.add(one)
    populator.set_paused(False)
    eventually(lambda: populator.status().state == "ready")
    assert [(one is large, start // MIB) for one, start, _ in window.ranges] == [
        *((True, start) for start in (0, 32)),
        *((False, start) for start in (0, 32)),
        *((True, start) for start in (64, 96)),
    ]


def test_an_extent_that_a_pool_gets_meanwhile_goes_before_the_one_under_way(
    window: FakeWindow, make: MakePopulator, extent: MakeExtent
) -> None:
    window.go_on.clear()
    one, other = extent(2 * STEP_BYTES), extent(STEP_BYTES)
    populator = make()
    populator.add(one)
    populator.add(other)
    eventually(window.entered.is_set)
    other.row = 3
    window.go_on.set()
    eventually(lambda: populator.status().state == "ready")
    assert [(found is one, start) for found, start, _ in window.ranges] == [(True, 0), (False, 0), (True, STEP_BYTES)]


def test_what_the_limits_refuse_is_shown_and_tried_again_on_request(
    window: FakeWindow, make: MakePopulator, extent: MakeExtent, limits: MemoryLimits
) -> None:
    limits.meminfo.write_text(f"MemAvailable: {(64 + 64 + 32) << 10} kB\n")  # one step, the reserve, and half a step
    populator = make()
    one, other = extent(STEP_BYTES), extent(STEP_BYTES)

    def take() -> None:  # after the first chunk only, not after the failure
        if not other.populated_bytes and populator.status().error is None:
            limits.meminfo.write_text(f"MemAvailable: {(64 + 32) << 10} kB\n")

    populator.add_listener(take)
    populator.add(one)
    eventually(lambda: populator.status().state == "ready")
    populator.add(other)
    eventually(lambda: populator.status().state == "degraded")
    status = populator.status()
    assert status.error is not None
    assert "64 MiB are needed beside a reserve of 64 MiB, but the machine has 96 MiB" in status.error
    assert (one.populated_bytes, other.populated_bytes) == (STEP_BYTES, 0)
    limits.meminfo.write_text(f"MemAvailable: {1 << 30} kB\n")
    assert populator.status().state == "degraded", "nobody has asked"
    populator.retry()
    eventually(lambda: populator.status().state == "ready")
    assert other.populated_bytes == STEP_BYTES


def test_a_refusal_is_in_the_log_once_however_often_it_is_tried_again(
    window: FakeWindow,
    make: MakePopulator,
    extent: MakeExtent,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The node tries every 10 s, and the memory that is left differs each time."""
    populator = make()
    for number in range(5):
        window.failures.append(PinError("out_of_memory", f"{number} MiB are left"))
        if number:
            populator.retry()
        else:
            populator.add(extent(STEP_BYTES))
        eventually(lambda number=number: populator.status().error == f"{number} MiB are left")
    assert caplog.text.count("populating stopped") == 1
    populator.retry()
    eventually(lambda: populator.status().state == "ready")
    window.failures.append(PinError("out_of_memory", "0 MiB are left"))
    populator.add(extent(STEP_BYTES))
    eventually(lambda: populator.status().state == "degraded")
    assert caplog.text.count("populating stopped") == 2


def test_a_defect_stops_populating_but_neither_the_thread_nor_silently(
    window: FakeWindow, make: MakePopulator, extent: MakeExtent
) -> None:
    window.failures.append(ZeroDivisionError("a defect"))
    populator = make()
    populator.add(extent(2 * MIB))
    eventually(lambda: populator.status().state == "failed")
    status = populator.status()
    assert "a defect" in str(status.error)
    populator.add(extent(2 * MIB))
    eventually(lambda: populator.status().state == "ready")


def test_a_refusal_ends_with_the_last_extent_that_needs_memory(
    window: FakeWindow, make: MakePopulator, extent: MakeExtent
) -> None:
    window.failures.append(PinError("hugepages", "no page left"))
    populator = make()
    refused, other = extent(2 * MIB), extent(2 * MIB)
    populator.add(refused)
    eventually(lambda: populator.status().state == "degraded")
    populator.set_paused(True)
    populator.add(other)
    window.failures.append(PinError("hugepages", "no page left"))
    populator.set_paused(False)
    eventually(lambda: populator.status().state == "degraded")
    populator.discard(refused)
    assert populator.status().state == "degraded", "the other one was refused, too"
    populator.discard(other)
    status = populator.status()
    assert (status.state, status.error) == ("ready", None)


def test_close_does_not_wait_for_the_pause_nor_for_the_rest_of_a_chunk(
    window: FakeWindow, make: MakePopulator, extent: MakeExtent
) -> None:
    populator = make(pause=1e6)
    populator.add(extent(4 * STEP_BYTES))
    assert window.entered.wait(60)
    populator.close()
    assert populator.status().state == "closed"
    window.entered.clear()
    window.go_on.clear()
    other = make()
    other.add(extent(4 * STEP_BYTES))
    assert window.entered.wait(60)
    other.close()


def test_a_discarded_extent_is_left_alone_before_discard_returns(
    window: FakeWindow, make: MakePopulator, extent: MakeExtent
) -> None:
    window.go_on.clear()
    populator = make()
    one, other = extent(STEP_BYTES), extent(STEP_BYTES)
    populator.add(one)
    assert window.entered.wait(60)
    populator.discard(one)
    one.close()
    window.go_on.set()
    populator.add(other)
    eventually(lambda: populator.status().state == "ready")
    assert [found for found, *_ in window.ranges] == [other]
    assert one.populated_bytes == 0
    populator.discard(one)


def test_an_adopted_extent_is_populated_from_its_watermark_on(
    window: FakeWindow, make: MakePopulator, extent: MakeExtent
) -> None:
    one = extent(3 * STEP_BYTES)
    one.populated_bytes = 2 * STEP_BYTES
    populator = make()
    populator.add(one)
    eventually(lambda: populator.status().state == "ready")
    assert [(start, end) for _, start, end in window.ranges] == [(2 * STEP_BYTES, 3 * STEP_BYTES)]


def test_an_extent_begins_where_its_own_memory_ends(
    window: FakeWindow, make: MakePopulator, extent: MakeExtent
) -> None:
    """Not where one ended that was sealed when it was populated in part, and whose place in memory the object takes."""
    populator = make(chunk_bytes=32 * MIB)
    sealed = Extent.create(STEP_BYTES)
    pauses = True
    populator.add_listener(lambda: populator.set_paused(pauses))
    populator.add(sealed)
    eventually(lambda: populator.status().state == "paused")
    fcntl.fcntl(sealed.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    pauses = False
    populator.set_paused(False)
    eventually(lambda: not populator.status().target_bytes)
    populator.discard(sealed)
    sealed.close()
    number = id(sealed)
    window.ranges.clear()
    del sealed
    others = [extent(STEP_BYTES) for _ in range(20)]
    other = next((one for one in others if id(one) == number), others[0])
    populator.add(other)
    eventually(lambda: populator.status().state == "ready")
    assert [(start // MIB, end // MIB) for _, start, end in window.ranges] == [(0, 32), (32, 64)]


@pytest.mark.parametrize(("name", "value"), [("chunk_bytes", 0), ("pause", -1.0)])
def test_settings_out_of_range_are_refused(limits: MemoryLimits, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        Populator(limits, **{name: value})  # type: ignore[arg-type]
