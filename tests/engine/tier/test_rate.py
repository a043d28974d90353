from kvstow.tier.rate import RecentRate


def test_the_recent_rate_is_that_of_most_bytes() -> None:
    recent = RecentRate()
    assert recent.per_second is None
    recent.observe(0, 1.0)
    assert recent.per_second is None
    recent.observe(1000, 1.0)
    for _ in range(8):
        recent.observe(10, 1.0)  # small ones, which take as long
        assert recent.per_second == 1000
    for _ in range(9):
        recent.observe(500, 1.0)
    assert recent.per_second == 500


def test_empty_calls_measure_nothing() -> None:
    rate = RecentRate()
    rate.observe(0, 1.0)
    rate.observe(10, 0.0)
    assert rate.per_second is None


def test_a_call_may_take_four_times_as_long_as_recent_ones_and_half_a_second() -> None:
    rate = RecentRate()
    assert rate.timeout(0) == 0.5
    assert rate.timeout(50_000_000) == 4.5
    rate.observe(100, 1.0)
    assert rate.timeout(100) == 4.5
    assert rate.timeout(100_000) == 30.0
