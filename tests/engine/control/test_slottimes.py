from __future__ import annotations

import pytest

from kvstow.control.slots import SlotTimes


@pytest.fixture
def times() -> SlotTimes:
    times = SlotTimes()
    times.grow(40)
    return times


@pytest.mark.parametrize("runs", [[range(3, 30)], [range(3, 5), [7, 6], range(20, 30)], [[9]], []])
def test_only_the_given_runs_are_marked(times: SlotTimes, runs: list[range | list[int]]) -> None:
    times.mark_used(runs, 5.0)
    assert [slot for slot in range(40) if times.used_at(slot) == 5.0] == sorted(slot for run in runs for slot in run)
    assert {times.stored_at(slot) for slot in range(40)} == {0.0}


@pytest.mark.parametrize("slots", [[], [5], [5, 6, 7], [5, 7, 8, 12], [3, 4, 6]])
def test_a_store_counts_as_a_use(times: SlotTimes, slots: list[int]) -> None:
    times.mark_stored(slots, 5.0)
    assert [slot for slot in range(40) if times.stored_at(slot) == 5.0] == slots
    assert [slot for slot in range(40) if times.used_at(slot) == 5.0] == slots


def test_slots_are_found_by_their_times(times: SlotTimes) -> None:
    times.mark_stored([4, 5, 6, 30], 5.0)
    times.mark_used([[5]], 7.0)
    times.mark_stored([6], 9.0)
    assert times.until("stored", 5.0, 4, 40) == [4, 5, *range(7, 40)]
    assert times.until("used", 6.0, 3, 8) == [3, 4, 7]
    assert times.until("used", 7.0, 3, 8) == [3, 4, 5, 7]
