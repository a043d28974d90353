from __future__ import annotations

from tests.doubles.fakes import FakeClock

from kvstow.memory.pinning import PinProgress


def test_the_rate_is_bytes_over_time_and_does_not_change_afterwards() -> None:
    clock = FakeClock(100.0)
    progress = PinProgress(clock)
    assert progress.rate is None
    progress.begin(1000)
    assert progress.rate is None, "nothing is pinned yet"
    clock.advance(0.5)
    progress.record(3000)
    assert progress.rate == 4000
    clock.advance(60)  # no growth, for example because the next chunk does not fit
    assert progress.rate == 4000
    progress.begin(3000)  # the next chunk of the same growth
    clock.advance(3.5)
    progress.record(65_000)
    assert progress.rate == 1000
    progress.end()
    clock.advance(3600)
    assert progress.rate == 1000, "the growth is over"


def test_each_growth_has_a_rate_of_its_own() -> None:
    clock = FakeClock(100.0)
    progress = PinProgress(clock)
    for pinned, rate in ((6000, 6000), (6500, 500)):
        progress.begin(pinned - rate)
        assert progress.rate is None
        clock.advance(1)
        progress.record(pinned)
        progress.end()
        assert progress.rate == rate


def test_elapsed_time_stops_with_the_growth() -> None:
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
