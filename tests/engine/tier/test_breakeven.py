from __future__ import annotations

import pytest

from kvstow.prefill import PrefillCost
from kvstow.testing.fakes import FakeClock
from kvstow.tier.rate import BreakEven

SLOT = 1000
TOKENS = 10


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def even(clock: FakeClock) -> BreakEven:
    """Computes a block in 0.1 s, so it breaks even at 10,000 bytes per second."""
    return BreakEven(SLOT, TOKENS, clock, prefill_rate=100.0)


def measure(even: BreakEven, bytes_per_second: float) -> None:
    for _ in range(100):
        even.note_fetch(1, SLOT / bytes_per_second)


def test_a_fetch_pays_while_the_prefill_speed_is_unknown(clock: FakeClock) -> None:
    assert BreakEven(SLOT, TOKENS, clock).decide(5, 5, 0).pays
    assert BreakEven(SLOT, None, clock, prefill_rate=100.0).decide(5, 5, 0).pays


def test_no_request_waits_for_a_store_that_was_not_measured(even: BreakEven) -> None:
    estimate = even.decide(5, 5, 0)
    assert not estimate.pays
    assert estimate.compute_seconds == pytest.approx(0.5)
    assert "not been measured" in estimate.reason


def test_a_fetch_may_pay_once_the_store_was_measured(even: BreakEven, clock: FakeClock) -> None:
    assert BreakEven(SLOT, TOKENS, clock).may_pay, "the prefill speed is unknown"
    assert not even.may_pay
    measure(even, 20_000)
    assert even.may_pay
    measure(even, 1_000)
    assert not even.decide(5, 5, 0).pays
    assert not even.may_pay


def test_the_decision_compares_times(even: BreakEven) -> None:
    measure(even, 20_000)
    estimate = even.decide(5, 5, 0)
    assert estimate.pays
    assert estimate.fetch_seconds == pytest.approx(0.25)
    assert estimate.reason == "5 blocks take 0.250 s to fetch and 0.500 s to compute: a fetch pays"
    assert not even.decide(5, 5, queued=6).pays, "the fetch would wait for others"
    assert even.decide(2, 5, 0).pays, "a few missing blocks make the others useful"
    even.note_lookup(0.3)
    assert not even.decide(5, 5, 0).pays


def test_near_the_break_even_the_decision_stays(even: BreakEven) -> None:
    measure(even, 11_000)
    assert even.decide(5, 5, 0).pays
    measure(even, 9_000)
    assert not even.decide(5, 5, 0).pays
    measure(even, 11_000)
    assert not even.decide(5, 5, 0).pays, "not much quicker than computing"
    measure(even, 13_000)
    assert even.decide(5, 5, 0).pays
    measure(even, 11_000)
    assert even.decide(5, 5, 0).pays


def test_engines_tell_what_prefill_costs_unless_it_is_known(clock: FakeClock, even: BreakEven) -> None:
    told = BreakEven(SLOT, TOKENS, clock)
    for one in (told, even):
        one.note_prefill(PrefillCost(0.02, 0.001, 1000.0))
    assert told.compute_seconds(5) == pytest.approx(50 * (0.02 + 0.001 * 24.5))
    assert even.compute_seconds(5) == pytest.approx(0.5)


def test_blocks_behind_a_long_context_take_longer_to_compute(clock: FakeClock) -> None:
    even = BreakEven(SLOT, TOKENS, clock)
    even.note_prefill(PrefillCost(0.01, 0.0001, 1000.0))
    measure(even, 8_000)
    assert not even.decide(5, 5, 0).pays
    assert even.decide(5, 5, 0, behind=50).pays


def test_the_store_is_measured_now_and_then_while_no_fetch_pays(even: BreakEven, clock: FakeClock) -> None:
    assert even.wants_probe()
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        clock.advance(pause - 0.1)
        assert not even.wants_probe()
        clock.advance(0.1)
        assert even.wants_probe()
    measure(even, 20_000)
    assert even.decide(5, 5, 0).pays
    clock.advance(30.0)
    assert even.wants_probe()
    clock.advance(1.0)
    assert even.wants_probe(), "the pauses begin anew"


def test_one_slow_call_changes_no_decision(even: BreakEven) -> None:
    measure(even, 20_000)
    for _ in range(4):
        even.note_fetch(1, 1000.0)
        assert even.decide(5, 5, 0).pays
    even.note_fetch(1, 1000.0)
    assert not even.decide(5, 5, 0).pays
