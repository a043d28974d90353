from __future__ import annotations

import pytest

from kvstow.config import PoolConfig
from kvstow.errors import ConfigError
from kvstow.memory.pace import AdaptivePace, FixedPace, Pace, pace_of

MIB = 1 << 20


def run(pace: Pace, bytes_per_second: float, calls: int = 20) -> float:
    """Let calls of the pace's size take as long as they do at that rate; the duration of the last one."""
    for _ in range(calls):
        seconds = pace.chunk_bytes / bytes_per_second
        pace.record(pace.chunk_bytes, seconds)
    return pace.chunk_bytes / bytes_per_second


@pytest.mark.parametrize("target", [0.0005, 0.001, 0.004])
@pytest.mark.parametrize("bytes_per_second", [4 << 30, 16 << 30])
def test_one_call_takes_half_the_latency_target(target: float, bytes_per_second: float) -> None:
    pace = AdaptivePace(target)
    assert run(pace, bytes_per_second) == pytest.approx(min(target / 2, 64 * MIB / bytes_per_second), rel=0.01)


def test_a_larger_target_pins_faster_only_by_larger_calls() -> None:
    slow, fast = AdaptivePace(0.001), AdaptivePace(0.002)
    assert run(fast, 16 << 30) == pytest.approx(2 * run(slow, 16 << 30), rel=0.01)
    assert fast.pause == pytest.approx(2 * slow.pause, rel=0.01)


def test_others_have_the_lock_longer_than_pinning_has() -> None:
    pace = AdaptivePace(0.001)
    pace.record(8 * MIB, 0.0005)
    assert pace.pause == pytest.approx(0.001)


def test_a_call_that_was_slow_makes_the_next_one_smaller_at_once() -> None:
    pace = AdaptivePace(0.001)
    pace.record(8 * MIB, 0.004)
    assert pace.chunk_bytes == MIB
    assert pace.pause == pytest.approx(0.008)


def test_calls_grow_step_by_step_and_not_without_end() -> None:
    pace = AdaptivePace(1.0)
    pace.record(8 * MIB, 0.0)
    assert pace.chunk_bytes == 12 * MIB
    run(pace, 1e15)
    assert pace.chunk_bytes == 64 * MIB


def test_calls_do_not_shrink_to_nothing() -> None:
    pace = AdaptivePace(0.001)
    run(pace, 1000.0)
    assert pace.chunk_bytes == MIB


def test_a_fixed_pace_stays_whatever_the_calls_take() -> None:
    pace = FixedPace(3 * MIB, 0.25)
    pace.record(3 * MIB, 100.0)
    assert (pace.chunk_bytes, pace.pause) == (3 * MIB, 0.25)


def test_the_pace_is_adaptive_unless_chunk_or_pause_is_given() -> None:
    assert isinstance(pace_of(PoolConfig(1, 1)), AdaptivePace)
    for given, expected in (
        ({"chunk_bytes": MIB}, (MIB, 0.002)),
        ({"pause": 0.0}, (64 * MIB, 0.0)),
        ({"chunk_bytes": MIB, "pause": 0.5}, (MIB, 0.5)),
    ):
        pace = pace_of(PoolConfig(1, 1, **given))
        assert isinstance(pace, FixedPace)
        assert (pace.chunk_bytes, pace.pause) == expected


def test_the_latency_target_of_the_settings_is_used() -> None:
    default, doubled = pace_of(PoolConfig(1, 1)), pace_of(PoolConfig(1, 1, latency_target=0.002))
    assert run(doubled, 4 << 30) == pytest.approx(2 * run(default, 4 << 30), rel=0.01)


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
