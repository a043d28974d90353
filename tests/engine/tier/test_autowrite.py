from __future__ import annotations

import pytest

from kvstow.testing.fakes import FakeClock
from kvstow.tier.autowrite import AutoWrite

CAPACITY = 6_000  # blocks of one byte: ten minutes of ten blocks a second


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def mode(auto: AutoWrite) -> str:
    return auto.mode


def run(auto: AutoWrite, clock: FakeClock, blocks_per_second: int, minutes: int) -> None:
    for _ in range(60 * minutes):
        auto.note_new(blocks_per_second)
        clock.advance(1.0)
    auto.note_new(0)


def test_all_blocks_are_put_while_new_ones_are_being_counted(clock: FakeClock) -> None:
    auto = AutoWrite(CAPACITY, 1, clock)
    auto.note_new(1_000_000)
    clock.advance(59.9)
    auto.note_new(1_000_000)
    assert mode(auto) == "through"
    assert "being counted" in auto.reason
    clock.advance(0.1)
    auto.note_new(0)
    assert mode(auto) == "selective"


def test_a_store_that_holds_ten_minutes_of_new_blocks_gets_all_of_them(clock: FakeClock) -> None:
    auto = AutoWrite(CAPACITY, 1, clock)
    run(auto, clock, 10, 5)
    assert mode(auto) == "through"
    assert auto.reason == (
        "all blocks are put: the store holds the new blocks of 600 s (10 B a second), and 600 s are wanted"
    )


def test_a_smaller_one_gets_blocks_at_their_second_use(clock: FakeClock) -> None:
    auto = AutoWrite(CAPACITY, 2, clock)
    run(auto, clock, 10, 5)
    assert mode(auto) == "selective"
    assert auto.reason == (
        "blocks are put at their second use: the store holds the new blocks of 300 s (20 B a second), "
        "and 600 s are wanted"
    )


def test_near_the_limit_the_mode_stays(clock: FakeClock) -> None:
    auto = AutoWrite(CAPACITY, 1, clock)
    run(auto, clock, 11, 15)
    assert mode(auto) == "selective"
    run(auto, clock, 9, 15)
    assert mode(auto) == "selective", "667 s: not much more than is wanted"
    run(auto, clock, 7, 15)
    assert mode(auto) == "through"
    run(auto, clock, 9, 15)
    assert mode(auto) == "through"


def test_a_quiet_hour_changes_nothing(clock: FakeClock) -> None:
    auto = AutoWrite(CAPACITY, 1, clock)
    run(auto, clock, 20, 5)
    clock.advance(3600.0)
    auto.note_new(0)
    assert mode(auto) == "selective"
    run(auto, clock, 5, 2)
    assert mode(auto) == "through", "what was long ago does not count"


def test_without_a_capacity_all_blocks_are_put(clock: FakeClock) -> None:
    auto = AutoWrite(None, 1, clock)
    run(auto, clock, 1_000_000, 2)
    assert mode(auto) == "through"
    assert "does not say how much it holds" in auto.reason
