"""Which steps say how fast prompts are computed, and what they say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.testing.fakes import FakeClock
from kvstow_service.connectors.vllm.attachedfeeds import PrefillMeter, PrefillSpeed


def step(scheduled: dict[str, int], drafts: dict[str, list[int]] | None = None) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=drafts or {},
    )


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def meter(clock: FakeClock) -> PrefillMeter:
    return PrefillMeter(100, clock)


def run(meter: PrefillMeter, clock: FakeClock, number: int, planned: Any, seconds: float) -> PrefillSpeed | None:
    meter.planned(number, planned)
    clock.advance(seconds)
    return meter.ended(number)


def test_a_step_of_prompts_counts_with_its_own_time_alone(meter: PrefillMeter, clock: FakeClock) -> None:
    assert run(meter, clock, 1, step({"a": 300, "b": 200}), 0.5) == PrefillSpeed(500, 0.5)
    clock.advance(60)  # idle
    assert run(meter, clock, 2, step({"a": 500}), 0.25) == PrefillSpeed(500, 0.25)


def test_steps_of_few_tokens_or_none_say_nothing(meter: PrefillMeter, clock: FakeClock) -> None:
    assert run(meter, clock, 1, step({"a": 99}), 0.5) is None
    assert run(meter, clock, 2, step({}), 0.5) is None
    assert run(meter, clock, 3, step(dict.fromkeys(map(str, range(200)), 1)), 0.5) is None


def test_the_time_of_decoding_is_subtracted(meter: PrefillMeter, clock: FakeClock) -> None:
    run(meter, clock, 1, step({"a": 1, "b": 1}), 0.1)
    found = run(meter, clock, 2, step({"a": 1, "b": 1, "c": 400}), 0.5)
    assert found is not None
    assert found.tokens == 400
    assert found.seconds == pytest.approx(0.4)
    found = run(meter, clock, 3, step({"a": 1, "c": 400}), 0.1)
    assert found is not None
    assert found.seconds == pytest.approx(0.05), "never less than half of the step"


def test_drafts_are_no_prompt(meter: PrefillMeter, clock: FakeClock) -> None:
    drafted = step({"a": 120}, {"a": [0] * 119})
    assert run(meter, clock, 1, drafted, 0.5) is None


def test_a_step_that_was_planned_ahead_begins_when_the_one_before_ends(meter: PrefillMeter, clock: FakeClock) -> None:
    meter.planned(1, step({"a": 200}))
    clock.advance(0.1)
    meter.planned(2, step({"a": 200}))
    clock.advance(0.1)
    first = meter.ended(1)
    clock.advance(0.3)
    second = meter.ended(2)
    assert first is not None
    assert second is not None
    assert first.seconds == pytest.approx(0.2)
    assert second.seconds == pytest.approx(0.3)


def test_a_step_whose_end_is_never_told_is_forgotten(meter: PrefillMeter, clock: FakeClock) -> None:
    meter.planned(1, step({"a": 200}))
    found = run(meter, clock, 2, step({"a": 300}), 0.5)
    assert found is not None
    assert found.tokens == 300
    assert meter.ended(1) is None
    assert meter.ended(2) is None
