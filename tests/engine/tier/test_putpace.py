from __future__ import annotations

from math import inf

import pytest

from kvstow.testing.fakes import FakeClock
from kvstow.tier.putpace import PutPace


def put_all(pace: PutPace) -> int:
    allowed = int(pace.allowed)
    pace.spend(allowed)
    return allowed


@pytest.mark.parametrize("rate", [3.0, 40.0, 1000.0])
def test_in_no_second_is_more_than_twice_the_rate_put(rate: float) -> None:
    clock = FakeClock()
    pace = PutPace(rate, clock)
    clock.advance(100.0)
    puts = []
    for _ in range(50):
        puts.append(put_all(pace))
        clock.advance(0.1)
    assert max(sum(puts[at : at + 10]) for at in range(41)) <= 2 * rate
    assert sum(puts) == pytest.approx(rate * (1 + 4.9), abs=1), "and for long, as much as the rate says"


def test_a_slow_pace_allows_a_block_now_and_then() -> None:
    clock = FakeClock()
    pace = PutPace(0.1, clock)
    assert [put_all(pace), put_all(pace)] == [1, 0]
    clock.advance(9.0)
    assert put_all(pace) == 0
    clock.advance(1.1)
    assert put_all(pace) == 1


def test_without_a_limit_all_is_allowed() -> None:
    pace = PutPace(inf, FakeClock())
    assert pace.allowed == inf
    pace.spend(1_000)
    assert pace.allowed == inf
