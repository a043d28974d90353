"""Which steps say what computing prompts costs, what loads have saved, and when the engine has waited for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.doubles.fakes import FakeClock

from kvstow.prefill import PrefillNews, PromptPart
from kvstow_service.connectors.engine_core.loadpolicy import LoadPolicy
from kvstow_service.connectors.engine_core.trackedrequests import Choice

PER_TOKEN = 0.001


def step(scheduled: dict[str, int], drafts: dict[str, list[int]] | None = None) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=drafts or {},
    )


class Meter(LoadPolicy):
    """Runs steps one after the other, by a fake clock. A block takes 1 ms on the link."""

    def __init__(self, known: bool = False) -> None:
        self.clock = FakeClock(100.0)
        super().__init__("auto", 0.01, 20_000_000, self.clock, least_tokens=100)
        self.number = 0
        self.observed: list[tuple[PromptPart, float]] = []
        fit = self._steps._fit
        observe = fit.observe

        def note(part: PromptPart, seconds: float) -> None:
            self.observed.append((part, seconds))
            observe(part, seconds)

        fit.observe = note  # type: ignore[method-assign]
        if known:
            for _ in range(8):
                self.run(step({"a": 500}), 500 * PER_TOKEN)
            news = self.take_news()
            assert news is not None
            assert news == PrefillNews(news.cost)
            assert news.cost.per_token == pytest.approx(PER_TOKEN)

    def plan(self, planned: Any, load_seconds: float = 0.0, **computed: int) -> int:
        """`computed`: how many tokens of a request were computed before."""
        self.number += 1
        requests: Any = {
            name: SimpleNamespace(request=SimpleNamespace(num_computed_tokens=computed.get(name, 0)))
            for name in planned.num_scheduled_tokens
        }
        self.requests = requests
        self.begun(Choice(True, "alone"), round(load_seconds * 1000))
        self.planned(self.number, planned)
        return self.number

    def run(self, planned: Any, seconds: float, load_seconds: float = 0.0, **computed: int) -> None:
        number = self.plan(planned, load_seconds, **computed)
        self.clock.advance(seconds)
        self.step_ended(number)


def test_a_step_of_prompts_counts_with_its_own_time_alone() -> None:
    meter = Meter()
    meter.run(step({"a": 300, "b": 200}), 0.5)
    meter.clock.advance(60)  # idle
    meter.run(step({"a": 500}), 0.25)
    assert meter.observed == [
        (PromptPart(500, 299 * 300 // 2 + 199 * 200 // 2), 0.5),
        (PromptPart.between(0, 500), 0.25),
    ]


def test_a_chunk_has_the_chunks_before_it_as_its_context() -> None:
    meter = Meter()
    meter.run(step({"a": 300}), 0.5, a=1200)
    assert meter.observed == [(PromptPart.between(1200, 1500), 0.5)]


def test_steps_of_few_tokens_or_none_say_nothing() -> None:
    meter = Meter()
    meter.run(step({"a": 99}), 0.5)
    meter.run(step({}), 0.5)
    meter.run(step(dict.fromkeys(map(str, range(200)), 1)), 0.5)
    assert meter.observed == []


def test_the_time_of_decoding_is_subtracted() -> None:
    meter = Meter()
    meter.run(step({"a": 1, "b": 1}), 0.1)
    meter.run(step({"a": 1, "b": 1, "c": 400}), 0.5)
    meter.run(step({"a": 1, "c": 400}), 0.1)
    assert [part.tokens for part, _ in meter.observed] == [400, 400]
    assert [seconds for _, seconds in meter.observed] == pytest.approx([0.4, 0.05]), "half of the step at least"


def test_drafts_are_no_prompt() -> None:
    meter = Meter()
    meter.run(step({"a": 120}, {"a": [0] * 119}), 0.5)
    assert meter.observed == []


def test_a_step_that_was_planned_ahead_begins_when_the_one_before_ends() -> None:
    meter = Meter()
    first = meter.plan(step({"a": 200}))
    meter.clock.advance(0.1)
    second = meter.plan(step({"a": 200}))
    meter.clock.advance(0.1)
    meter.step_ended(first)
    meter.clock.advance(0.3)
    meter.step_ended(second)
    assert [seconds for _, seconds in meter.observed] == pytest.approx([0.2, 0.3])


def test_a_step_whose_end_is_never_told_is_forgotten() -> None:
    meter = Meter()
    lost = meter.plan(step({"a": 200}))
    meter.run(step({"a": 300}), 0.5)
    meter.step_ended(lost)
    meter.step_ended(lost + 1)
    assert [part.tokens for part, _ in meter.observed] == [300]


def test_nothing_is_told_before_the_cost_is_known_and_then_everything_once() -> None:
    meter = Meter()
    meter.loaded(PromptPart.between(0, 1000))
    for _ in range(7):
        meter.run(step({"a": 500}), 500 * PER_TOKEN)
        assert meter.take_news() is None
    meter.run(step({"a": 500}), 500 * PER_TOKEN)
    news = meter.take_news()
    assert news is not None
    assert news.hit_tokens == 1000
    assert news.hit_seconds == pytest.approx(1000 * PER_TOKEN)
    assert meter.take_news() is None, "it is told once"


def waited(meter: Meter) -> float:
    news = meter.take_news()
    return 0.0 if news is None else news.waited


def test_the_engine_waits_for_a_load_before_its_step_while_nothing_runs() -> None:
    meter = Meter(known=True)
    meter.clock.advance(5.0)  # idle
    meter.begun(Choice(False, "burst"), 1)
    meter.clock.advance(0.2)
    meter.begun(Choice(False, "burst"), 1)
    meter.clock.advance(0.3)
    meter.ended(1)
    number = meter.plan(step({"other": 1}))
    meter.clock.advance(7.0)  # it hides what is left of the other load
    meter.step_ended(number)
    meter.clock.advance(0.1)
    meter.ended(1)
    meter.clock.advance(5.0)
    meter.plan(step({"a": 1}))
    assert waited(meter) == pytest.approx(0.6)


def test_the_engine_waits_for_a_load_by_layer_as_long_as_its_step_takes_longer() -> None:
    meter = Meter(known=True)
    meter.run(step({"a": 500}), 500 * PER_TOKEN + 0.1, load_seconds=0.4)
    assert waited(meter) == pytest.approx(0.1)
    meter.run(step({"a": 500}), 500 * PER_TOKEN + 3.0, load_seconds=0.4)
    assert waited(meter) == pytest.approx(0.4), "no longer than the load takes"
    meter.run(step({"a": 500}), 400 * PER_TOKEN, load_seconds=0.4)
    assert waited(meter) == 0.0, "never less than nothing"


def test_a_step_with_loads_by_layer_shows_no_cost() -> None:
    meter = Meter(known=True)
    before = len(meter.observed)
    meter.run(step({"a": 500}), 9.0, load_seconds=0.4)
    assert len(meter.observed) == before
