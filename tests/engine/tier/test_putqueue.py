from __future__ import annotations

from kvstow.control.tiertraffic import PutQueue
from kvstow.testing.fakes import FakeClock

A, B, C, D = b"a", b"b", b"c", b"d"


def test_what_is_stored_is_put_once() -> None:
    queue = PutQueue(3, FakeClock())
    queue.note_stored([A, B])
    queue.note_stored([C])
    assert queue.has_work
    assert queue.take(2) == [A, B]
    assert queue.take(2) == [C]
    assert not queue.has_work


def test_the_oldest_block_is_dropped_for_a_new_one() -> None:
    queue = PutQueue(3, FakeClock())
    queue.note_stored([A, B])
    queue.note_stored([C, D])
    assert queue.take(9) == [B, C, D]
    assert queue.dropped == 1


def test_what_cannot_be_put_yet_is_put_later() -> None:
    queue = PutQueue(3, FakeClock())
    queue.note_stored([A, B])
    queue.put_back(queue.take(9))
    assert queue.take(9) == [A, B]
    assert queue.dropped == 0


def test_what_is_noted_while_nothing_is_taken_is_bounded() -> None:
    queue = PutQueue(3, FakeClock())
    for number in range(5):
        queue.note_stored([bytes([number])])
        queue.sort_out()
    assert len(queue) == 3
    assert queue.dropped == 2
    assert queue.take(9) == [b"\2", b"\3", b"\4"]


def test_while_the_store_is_full_blocks_are_dropped_and_the_pauses_grow() -> None:
    clock = FakeClock()
    queue = PutQueue(3, clock)
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        queue.note_full()
        queue.note_stored([A])
        clock.advance(pause - 0.1)
        assert queue.take(9) == []
        clock.advance(0.1)
        assert queue.take(9) == []
        queue.note_stored([B])
        assert queue.take(9) == [B]
    assert queue.dropped == 7
    queue.note_put()
    queue.note_full()
    clock.advance(1.0)
    queue.note_stored([C])
    assert queue.take(9) == [C]
