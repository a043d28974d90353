from __future__ import annotations

import pytest
from tests.doubles.fakes import FakeClock, Latch

from kvstow.config import PoolConfig
from kvstow.errors import ConfigError
from kvstow.memory.hoststeps import HostSteps
from kvstow.memory.pinning import AdaptivePace, FixedPace, Pace, pace_of

MIB = 1 << 20


def adaptive(target: float) -> AdaptivePace:
    return AdaptivePace(target, HostSteps(FakeClock()))


def run(pace: Pace, bytes_per_second: float, calls: int = 20) -> float:
    """Let calls of the pace's size take as long as they do at that rate; the duration of the last one."""
    for _ in range(calls):
        seconds = pace.chunk_bytes / bytes_per_second
        pace.record(pace.chunk_bytes, seconds, 0.0)
    return pace.chunk_bytes / bytes_per_second


@pytest.mark.parametrize("target", [0.001, 0.0015, 0.004])
@pytest.mark.parametrize("bytes_per_second", [8 << 30, 16 << 30])
def test_one_call_takes_the_latency_target(target: float, bytes_per_second: float) -> None:
    expected = max(8 * MIB / bytes_per_second, min(target, 84 * MIB / bytes_per_second))
    assert run(adaptive(target), bytes_per_second) == pytest.approx(expected, rel=0.01)


def test_calls_never_shrink_to_sizes_at_which_their_fixed_cost_dominates() -> None:
    pace = adaptive(0.001)
    pace.record(16 * MIB, 0.008, 0.0)
    assert pace.chunk_bytes == 8 * MIB
    run(pace, 1000.0)
    assert pace.chunk_bytes == 8 * MIB, "smaller calls are slower still, and keep the interpreter from the host"


def test_calls_grow_step_by_step_up_to_a_limit() -> None:
    pace = adaptive(1.0)
    pace.record(16 * MIB, 0.0, 0.0)
    assert pace.chunk_bytes == 24 * MIB
    run(pace, 1e15)
    assert pace.chunk_bytes == 84 * MIB


@pytest.mark.parametrize(("idle", "pause"), [(0.02, 0.003), (0.25, 0.003), (0.26, 0.00107692)])
def test_beside_an_idle_host_register_calls_take_two_fifths_of_the_time_and_soon_two_thirds(
    idle: float, pause: float
) -> None:
    clock = FakeClock()
    steps = HostSteps(clock)
    pace = AdaptivePace(0.001, steps)
    assert pace.delay(5.0) == 0, "nothing was done yet"
    steps.launched()
    clock.advance(idle)
    pace.record(16 * MIB, 0.002, clock())
    assert pace.delay(clock()) == pytest.approx(pause, rel=1e-4)
    assert pace.delay(clock() + pause + 0.0001) < 0


def test_a_host_that_has_made_no_step_yet_is_idle_for_long() -> None:
    pace = adaptive(0.001)
    pace.record(16 * MIB, 0.0013, 5.0)
    assert pace.delay(5.0) == pytest.approx(0.0007)


def test_while_the_device_works_on_a_step_they_take_a_twentieth() -> None:
    clock, work = FakeClock(), Latch()
    steps = HostSteps(clock)
    pace = AdaptivePace(0.001, steps)
    steps.launched(work)
    clock.advance(1.0)
    pace.record(16 * MIB, 0.001, clock())
    assert pace.delay(clock()) == pytest.approx(0.019)
    work.open()
    assert pace.delay(clock()) == pytest.approx(0.001 * 0.35 / 0.65)


def test_while_the_host_starts_they_take_a_tenth() -> None:
    steps = HostSteps(FakeClock())
    steps.is_starting = True
    pace = AdaptivePace(0.001, steps)
    pace.record(16 * MIB, 0.001, 0.0)
    assert pace.delay(0.0) == pytest.approx(0.009)


def test_during_steps_the_host_decides_when_and_the_pace_how_much() -> None:
    clock = FakeClock()
    steps = HostSteps(clock)
    pace = AdaptivePace(0.001, steps)
    steps.begin()
    pace.record(16 * MIB, 0.0005, clock())
    assert pace.delay(clock()) == 0
    assert pace.call_seconds == pytest.approx(0.00075)


def test_a_fixed_pace_ignores_the_time_of_calls_and_pauses_longer_while_the_host_starts() -> None:
    steps = HostSteps(FakeClock())
    pace = FixedPace(3 * MIB, 0.25, steps)
    assert (pace.delay(7.0), pace.call_seconds) == (0, None)
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
    default, doubled = pace_of(PoolConfig(1, 1), steps), pace_of(PoolConfig(1, 1, latency_target=0.0036), steps)
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
