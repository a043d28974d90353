from __future__ import annotations

from kvstow.memory.pinning import PinProgress
from kvstow.testing.clock import FakeClock


def test_the_rate_looks_back_a_few_seconds_and_ends_at_zero() -> None:
    clock = FakeClock(100.0)
    progress = PinProgress(clock)
    progress.begin(0)
    assert progress.rate == 0
    for second in range(1, 21):
        clock.advance(1)
        progress.record(1000 * second if second <= 10 else 10_000 + 3000 * (second - 10))
    assert progress.rate == 3000, "the slow first ten seconds are forgotten"
    clock.advance(2.5)
    assert 0 < progress.rate < 3000
    clock.advance(5)
    assert progress.rate == 0


def test_the_rate_outlasts_a_pause_between_chunks_that_is_longer_than_its_window() -> None:
    clock = FakeClock(100.0)
    progress = PinProgress(clock)
    progress.begin(0)
    for chunk in (1, 2, 3):
        clock.advance(60)
        progress.record(6000 * chunk)
        assert progress.rate == 100
    clock.advance(59)
    assert 50 < progress.rate < 100
    clock.advance(62)
    assert progress.rate == 0, "two pauses are over: it stands still"


def test_elapsed_runs_during_growth_and_stands_still_after_it() -> None:
    clock = FakeClock()
    progress = PinProgress(clock)
    clock.advance(7)
    assert progress.elapsed == 0
    progress.begin(0)
    clock.advance(2)
    progress.begin(500)  # the next chunk of the same growth
    clock.advance(1)
    assert progress.elapsed == 3
    progress.end()
    clock.advance(10)
    progress.end()
    assert progress.elapsed == 3
    progress.begin(500)
    assert progress.elapsed == 0
