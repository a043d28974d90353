from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from kvstow.control.blockevents import MAX_EVENT_KEYS, BlockEventLog


def batch(count: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(4, "big") for number in range(count))


def test_readers_keep_their_own_cursor() -> None:
    log = BlockEventLog(buffer=10, num_slots=lambda: 4)
    for n in range(4):
        log.append("stored", (bytes([n]),))
    page = log.read(after=0, limit=3)
    assert ([event.sequence for event in page.events], page.cursor, page.lost) == ([1, 2, 3], 3, 0)
    page = log.read(after=page.cursor)
    assert ([event.sequence for event in page.events], page.cursor, page.lost) == ([4], 4, 0)
    assert log.read(after=4) == ([], 4, 0)


def test_a_slow_reader_learns_how_many_events_it_lost() -> None:
    log = BlockEventLog(buffer=2, num_slots=lambda: 4)
    for n in range(5):
        log.append("removed", (bytes([n]),), "capacity")
    page = log.read(after=1)
    assert ([event.sequence for event in page.events], page.lost) == ([4, 5], 2)


def test_an_empty_batch_is_no_event() -> None:
    log = BlockEventLog(buffer=2, num_slots=lambda: 4)
    log.append("stored", ())
    assert log.last_sequence == 0
    assert log.read(0) == ([], 0, 0)


def test_the_number_of_kept_keys_follows_the_size_of_the_pool() -> None:
    log = BlockEventLog(buffer=100, num_slots=lambda: 1000)
    for _ in range(50):
        log.append("stored", batch(500))
    assert log.num_keys == 2000
    page = log.read(0)
    assert ([event.sequence for event in page.events], page.lost) == ([47, 48, 49, 50], 46)


def test_a_small_pool_keeps_a_key_for_each_event_of_the_buffer() -> None:
    log = BlockEventLog(buffer=100, num_slots=lambda: 4)
    for _ in range(500):
        log.append("stored", batch(1))
    assert log.num_keys == 100


def test_after_a_shrink_one_call_drops_a_bounded_number_of_events() -> None:
    slots = 100_000
    log = BlockEventLog(buffer=10_000, num_slots=lambda: slots)
    for _ in range(200):
        log.append("stored", batch(1000))
    slots = 1000
    kept = log.num_keys
    while log.num_keys > 10_000:
        log.append("stored", batch(100))
        assert kept - 2000 <= log.num_keys < kept
        kept = log.num_keys


def test_events_of_one_key_do_not_exceed_the_bound_of_the_log() -> None:
    log = BlockEventLog(buffer=1000, num_slots=lambda: 1000)
    for _ in range(1000):
        log.append("stored", batch(1))
    for _ in range(10):
        log.append("stored", batch(1000))
        assert log.num_keys <= 2000


def test_a_large_batch_becomes_several_events() -> None:
    log = BlockEventLog(buffer=100, num_slots=lambda: 10_000)
    keys = batch(2 * MAX_EVENT_KEYS + 5)
    log.append("removed", keys, "purge")
    events = log.read(0).events
    assert [len(event.keys) for event in events] == [MAX_EVENT_KEYS, MAX_EVENT_KEYS, 5]
    assert sum((event.keys for event in events), ()) == keys
    assert {(event.kind, event.reason) for event in events} == {("removed", "purge")}


def test_an_event_that_is_not_kept_is_lost() -> None:
    log = BlockEventLog(buffer=2, num_slots=lambda: 1)
    for _ in range(3):
        log.append("stored", batch(5))
    assert log.read(0) == ([], 3, 3)
    assert log.read(2) == ([], 3, 1)
    assert log.read(3) == ([], 3, 0)


class Walked(deque):  # type: ignore[type-arg]
    """Counts the steps of a reader: an item is found from the nearer end."""

    steps = 0

    def __getitem__(self, at: Any) -> Any:
        Walked.steps += min(at, len(self) - 1 - at) + 1
        return super().__getitem__(at)

    def __iter__(self) -> Any:
        Walked.steps += len(self)
        return super().__iter__()


def test_a_nearly_current_reader_skips_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.control.blockevents.deque", Walked)
    log = BlockEventLog(buffer=4096, num_slots=lambda: 4096)
    for _ in range(4096):
        log.append("stored", batch(1))
    Walked.steps = 0
    assert [event.sequence for event in log.read(4094).events] == [4095, 4096]
    assert log.read(4096).events == []
    assert Walked.steps <= 3
