from __future__ import annotations

from kvstow.testing.fakes import FakeClock
from kvstow.tier.autowrite import AutoWrite
from kvstow.tier.putpace import PutPace
from kvstow.tier.writepolicy import WriteMode, WritePolicy

A, B, C, D = b"a", b"b", b"c", b"d"


def policy(mode: WriteMode, clock: FakeClock | None = None) -> WritePolicy:
    return WritePolicy(mode, max_queued=3, max_seen=3, clock=clock or FakeClock())


def test_through_puts_what_is_stored_once() -> None:
    through = policy("through")
    through.note_stored([A, B])
    through.note_used([A])
    through.note_stored([C])
    assert through.has_work
    assert through.take(2) == [A, B]
    assert through.take(2) == [C]
    assert not through.has_work


def test_selective_puts_a_block_at_its_second_use() -> None:
    selective = policy("selective")
    selective.note_stored([A, B])
    assert selective.take(9) == []
    selective.note_used([A])
    assert selective.take(9) == [A]
    selective.note_used([A])
    selective.note_stored([B])  # computed again
    assert selective.take(9) == [B]


def test_selective_remembers_so_many_blocks() -> None:
    selective = policy("selective")
    selective.note_stored([A, B, C, D])
    selective.note_used([A, D])
    assert selective.take(9) == [D]


def test_back_puts_nothing_by_itself() -> None:
    back = policy("back")
    back.note_stored([A])
    back.note_used([A])
    assert not back.has_work, "nobody would take it"
    assert back.take(9) == []
    assert not back.has_work


def test_the_oldest_block_is_dropped_for_a_new_one() -> None:
    through = policy("through")
    through.note_stored([A, B])
    through.note_stored([C, D])
    assert through.take(9) == [B, C, D]
    assert through.dropped == 1


def test_what_is_noted_while_nothing_is_taken_is_bounded() -> None:
    through = policy("through")
    for number in range(5):
        through.note_stored([bytes([number])])
        through.sort_out()
    assert len(through) == 3
    assert through.dropped == 2
    assert through.take(9) == [b"\2", b"\3", b"\4"]


def test_while_the_store_is_full_blocks_are_dropped_and_the_pauses_grow() -> None:
    clock = FakeClock()
    through = policy("through", clock)
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        through.note_full()
        through.note_stored([A])
        clock.advance(pause - 0.1)
        assert through.take(9) == []
        clock.advance(0.1)
        assert through.take(9) == []
        through.note_stored([B])
        assert through.take(9) == [B]
    assert through.dropped == 7
    through.note_put()
    through.note_full()
    clock.advance(1.0)
    through.note_stored([C])
    assert through.take(9) == [C]


def test_forgotten_blocks_are_not_put() -> None:
    modes: tuple[WriteMode, ...] = ("through", "selective")
    for mode in modes:
        one = policy(mode)
        one.note_stored([A])
        one.forget()
        one.note_used([A])
        assert one.take(9) == []


def test_what_may_not_be_put_yet_waits_and_the_oldest_is_dropped() -> None:
    clock = FakeClock()
    paced = WritePolicy("through", max_queued=3, max_seen=3, clock=clock, pace=PutPace(2.0, clock))
    paced.note_stored([A, B, C])
    assert paced.take(9) == [A, B]
    assert paced.take(9) == []
    paced.note_stored([D])
    assert paced.has_work
    clock.advance(0.5)
    assert paced.take(9) == [C]
    paced.note_stored([A, B, C])
    clock.advance(60.0)
    assert paced.take(9) == [A, B], "no more at once than in a second"
    assert paced.dropped == 1


def test_auto_puts_all_blocks_until_the_store_is_too_small_for_them() -> None:
    clock = FakeClock()
    auto = WritePolicy("auto", 10_000, 10_000, clock, auto=AutoWrite(1_000, 1, clock))
    assert "being counted" in auto.decision
    auto.note_stored([A])
    assert auto.take(9) == [A]
    auto.note_stored([number.to_bytes(2, "big") for number in range(1_000)])
    auto.sort_out()
    clock.advance(60.0)
    auto.sort_out()
    assert auto.mode == "selective"
    assert "the store holds the new blocks of 60 s" in auto.decision
    auto.take(10_000)
    auto.note_stored([B])
    assert auto.take(9) == []
    auto.note_used([B])
    assert auto.take(9) == [B]


def test_a_mode_that_was_set_stays() -> None:
    assert policy("back").decision == "back, as it was set"
    assert policy("auto").mode == "through"
    assert "does not say how much it holds" in policy("auto").decision
