from __future__ import annotations

import pytest
from tests.doubles.fakes import FakeClock

from kvstow.prefill import PrefillCost
from kvstow.tier.blockstore import Expectation
from kvstow.tier.breakeven import FIRST_PROBE_SECONDS, PROBE_BLOCKS, PROBE_SECONDS, BreakEven

TOKENS = 10


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def even(clock: FakeClock) -> BreakEven:
    """Computes a block in 0.1 s."""
    even = BreakEven(TOKENS, clock)
    even.prefill = PrefillCost(0.01)
    return even


def takes(seconds: float | None, queued: float = 0.0) -> Expectation:
    return Expectation(seconds, int(queued > 0), queued)


def test_a_read_pays_while_the_prefill_speed_is_unknown(clock: FakeClock) -> None:
    even = BreakEven(TOKENS, clock)
    assert even.decide(takes(100.0), 5, 5).pays
    even = BreakEven(None, clock)
    even.prefill = PrefillCost(0.01)
    assert even.decide(takes(100.0), 5, 5).pays


def test_no_request_waits_for_a_store_that_was_not_measured(even: BreakEven) -> None:
    assert even.may_pay, "there was no decision"
    estimate = even.decide(takes(None), 5, 5)
    assert not estimate.pays
    assert estimate.compute_seconds == pytest.approx(0.5)
    assert "not been measured" in estimate.reason
    assert not even.may_pay


def test_the_decision_compares_times_and_counts_what_is_queued(even: BreakEven) -> None:
    estimate = even.decide(takes(0.25), 5, 5)
    assert estimate.pays
    assert estimate.reason == "5 blocks take 0.250 s to read, and 0.500 s to compute: reading them pays"
    estimate = even.decide(takes(0.41, queued=0.16), 5, 5)
    assert not estimate.pays
    assert "0.160 s of it in the queue" in estimate.reason
    assert even.decide(takes(0.41), 2, 6).pays, "a few missing blocks make the others useful"


def test_a_store_that_loses_what_is_read_does_not_pay_until_probes_bring_blocks_again(even: BreakEven) -> None:
    assert even.decide(takes(0.1), 5, 5).pays
    even.note_read(0, 200)
    estimate = even.decide(takes(0.1), 5, 5)
    assert not estimate.pays
    assert "only 4% of the blocks read lately came" in estimate.reason
    for _ in range(2):
        even.note_read(PROBE_BLOCKS, 0)
    assert even.decide(takes(0.1), 5, 5).pays


def test_tokens_behind_others_cost_more_to_compute(clock: FakeClock) -> None:
    even = BreakEven(TOKENS, clock)
    even.prefill = PrefillCost(0.01, per_context=0.001, longest=1000.0)
    near, far = even.compute_seconds(5), even.compute_seconds(5, behind=50)
    assert near is not None
    assert far is not None
    assert far > near


def test_the_pauses_between_probes_double_until_a_read_pays(even: BreakEven, clock: FakeClock) -> None:
    pause, begun = FIRST_PROBE_SECONDS, clock()
    for _ in range(8):
        assert even.wants_probe()
        clock.advance(pause - 0.001)
        assert not even.wants_probe()
        clock.advance(0.001)
        pause = min(PROBE_SECONDS, 2 * pause)
    assert clock() - begun > PROBE_SECONDS
    even.decide(takes(0.0), 5, 5)
    assert even.wants_probe()
    clock.advance(FIRST_PROBE_SECONDS)
    assert even.wants_probe()
