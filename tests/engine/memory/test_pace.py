from __future__ import annotations

import pytest

from kvstow.config import PoolConfig
from kvstow.errors import ConfigError
from kvstow.memory.hoststeps import IDLE_SECONDS, HostSteps
from kvstow.memory.pace import AdaptivePace, FixedPace, Pace, pace_of
from kvstow.testing.clock import FakeClock

MIB = 1 << 20


def adaptive(target: float, clock: FakeClock | None = None) -> AdaptivePace:
    return AdaptivePace(target, HostSteps(clock or FakeClock()))


def run(pace: Pace, bytes_per_second: float, calls: int = 20) -> float:
    """Let calls of the pace's size take as long as they do at that rate; the duration of the last one."""
    for _ in range(calls):
        seconds = pace.chunk_bytes / bytes_per_second
        pace.record(pace.chunk_bytes, seconds, 0.0)
    return pace.chunk_bytes / bytes_per_second


class Serving:
    """A host that makes a step each 10 ms beside an adaptive pace, 1 ms a call. Steps with a call in them take longer,
    by `cost` of themselves."""

    def __init__(self, cost: float) -> None:
        self.clock, self.cost = FakeClock(), cost
        self.steps = HostSteps(self.clock)
        self.pace = AdaptivePace(0.001, self.steps)

    def step(self) -> int:
        """Calls that the pace made in it."""
        self.steps.begin()
        calls, end = 0, self.clock() + 0.005
        for is_launched in (False, True):
            if is_launched:
                self.steps.launched()
            while self.clock() < end + 0.005 * is_launched:
                if self.pace.delay(self.clock()) <= 0:
                    with self.steps.pinning:
                        self.clock.advance(0.001)
                    self.pace.record(self.pace.chunk_bytes, 0.001, self.clock())
                    calls += 1
                else:
                    self.clock.advance(0.001)
        self.clock.advance(0.010 * self.cost * (calls > 0))
        return calls


@pytest.mark.parametrize("target", [0.001, 0.0015, 0.004])
@pytest.mark.parametrize("bytes_per_second", [8 << 30, 16 << 30])
def test_one_call_takes_the_latency_target(target: float, bytes_per_second: float) -> None:
    expected = max(8 * MIB / bytes_per_second, min(target, 64 * MIB / bytes_per_second))
    assert run(adaptive(target), bytes_per_second) == pytest.approx(expected, rel=0.01)


def test_calls_never_shrink_below_the_size_at_which_their_own_cost_prevails() -> None:
    pace = adaptive(0.001)
    pace.record(16 * MIB, 0.008, 0.0)
    assert pace.chunk_bytes == 8 * MIB
    run(pace, 1000.0)
    assert pace.chunk_bytes == 8 * MIB, "smaller calls are slower still, and keep the interpreter from the host"


def test_calls_grow_step_by_step_and_not_without_end() -> None:
    pace = adaptive(1.0)
    pace.record(16 * MIB, 0.0, 0.0)
    assert pace.chunk_bytes == 24 * MIB
    run(pace, 1e15)
    assert pace.chunk_bytes == 64 * MIB


def test_beside_an_idle_host_register_calls_take_two_fifths_of_the_time() -> None:
    pace = adaptive(0.001)
    assert pace.delay(5.0) == 0, "nothing was done yet"
    pace.record(16 * MIB, 0.002, 5.0)
    assert pace.delay(5.0) == pytest.approx(0.003)
    assert pace.delay(5.0031) == 0


def test_while_the_host_starts_they_take_a_tenth() -> None:
    steps = HostSteps(FakeClock())
    steps.is_starting = True
    pace = AdaptivePace(0.001, steps)
    pace.record(16 * MIB, 0.001, 0.0)
    assert pace.delay(0.0) == pytest.approx(0.009)


def test_beside_steps_they_take_a_share_of_six_hundredths_at_first() -> None:
    clock = FakeClock()
    pace = adaptive(0.001, clock)
    steps = pace._steps
    steps.begin()
    steps.launched()
    pace.record(16 * MIB, 0.0006, clock())
    assert pace.delay(clock()) == pytest.approx(0.0094)
    clock.advance(0.0095)
    assert pace.delay(clock()) == 0


def test_a_call_that_is_due_waits_a_moment_for_the_host_to_have_launched_its_step() -> None:
    clock = FakeClock()
    pace = adaptive(0.001, clock)
    pace.record(16 * MIB, 0.0006, clock())
    pace._steps.begin()
    clock.advance(0.0095)
    assert pace.delay(clock()) == pytest.approx(0.0099)
    pace._steps.launched()
    assert pace.delay(clock()) == 0, "at once"


def test_a_host_that_always_launches_gets_its_pool_all_the_same() -> None:
    clock = FakeClock()
    pace = adaptive(0.001, clock)
    pace.record(16 * MIB, 0.0006, clock())
    pace._steps.begin()
    clock.advance(0.0201)
    assert pace.delay(clock()) == 0


def test_one_step_of_eight_is_left_alone() -> None:
    clock = FakeClock()
    pace = adaptive(0.001, clock)
    rests = []
    for _ in range(24):
        pace._steps.begin()
        rests.append(pace.rest(clock()) > 0)
        assert (pace.delay(clock()) > 0) == rests[-1]
        pace._steps.launched()
        clock.advance(0.005)
    assert [number for number, rest in enumerate(rests, start=1) if rest] == [8, 16, 24]
    clock.advance(IDLE_SECONDS)
    assert pace.rest(clock()) == 0, "an idle host is not compared with anything"


def test_a_host_whose_steps_grow_longer_gets_the_least_share_and_one_that_feels_nothing_more() -> None:
    slowed, unharmed = Serving(cost=0.10), Serving(cost=0.0)
    for _ in range(1000):
        slowed.step()
        unharmed.step()
    assert slowed.pace.share == pytest.approx(0.055)
    assert unharmed.pace.share == pytest.approx(0.2)
    assert sum(slowed.step() for _ in range(100)) >= 30, "a busy engine still gets its pool"


def test_the_share_comes_back_when_the_host_feels_nothing_any_more() -> None:
    host = Serving(cost=0.10)
    for _ in range(1000):
        host.step()
    host.cost = 0.0
    for _ in range(1000):
        host.step()
    assert host.pace.share == pytest.approx(0.2)


def test_a_fixed_pace_stays_whatever_the_calls_take_and_rests_longer_while_the_host_starts() -> None:
    steps = HostSteps(FakeClock())
    pace = FixedPace(3 * MIB, 0.25, steps)
    assert (pace.delay(7.0), pace.rest(7.0)) == (0, 0)
    pace.record(3 * MIB, 100.0, 7.0)
    assert (pace.chunk_bytes, pace.delay(7.0), pace.delay(7.25)) == (3 * MIB, 0.25, 0)
    steps.is_starting = True
    assert pace.delay(7.25) == 1.0


def test_the_pace_is_adaptive_unless_chunk_or_pause_is_given() -> None:
    steps = HostSteps(FakeClock())
    assert isinstance(pace_of(PoolConfig(1, 1), steps), AdaptivePace)
    for given, expected in (
        ({"chunk_bytes": MIB}, (MIB, 0.002)),
        ({"pause": 0.0}, (64 * MIB, 0.0)),
        ({"chunk_bytes": MIB, "pause": 0.5}, (MIB, 0.5)),
    ):
        pace = pace_of(PoolConfig(1, 1, **given), steps)
        assert isinstance(pace, FixedPace)
        assert (pace.chunk_bytes, pace.pause) == expected


def test_the_latency_target_of_the_settings_is_used() -> None:
    steps = HostSteps(FakeClock())
    default, doubled = pace_of(PoolConfig(1, 1), steps), pace_of(PoolConfig(1, 1, latency_target=0.003), steps)
    assert run(doubled, 8 << 30) == pytest.approx(2 * run(default, 8 << 30), rel=0.01)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes is 0; allowed: a whole number, 1 or more"),
        ({"pause": -1.0}, "pause is -1.0; allowed: 0 or more seconds"),
        ({"latency_target": 0.0}, "latency_target is 0.0; allowed: more than 0 seconds"),
        ({"latency_target": float("inf")}, "latency_target is inf; allowed: more than 0 seconds"),
        (
            {"latency_target": 0.001, "pause": 0.0},
            r"latency_target is 0.001; allowed: none beside chunk_bytes or pause \(a fixed pace\)",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, float], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        PoolConfig(1, 1, **given)  # type: ignore[arg-type] # a dict of both kinds
