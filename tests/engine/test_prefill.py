"""The cost of prefill, fitted to steps."""

from __future__ import annotations

from random import Random

import pytest

from kvstow.prefill import PrefillCost, PrefillFit, PromptPart, weighted_median
from kvstow.stats import PrefillStats

A, B = 5e-5, 2e-9


def seconds_of(part: PromptPart) -> float:
    return A * part.tokens + B * part.context


def chunks(length: int, chunk: int = 2048) -> list[PromptPart]:
    return [PromptPart.between(start, min(length, start + chunk)) for start in range(0, length, chunk)]


def test_the_context_of_each_token_is_what_comes_before_it() -> None:
    assert PromptPart.between(3, 6) == PromptPart(3, 3 + 4 + 5)
    assert PromptPart.between(0, 3).with_part(PromptPart.between(3, 6)) == PromptPart.between(0, 6)


def test_half_of_all_weight_is_at_the_median_or_below() -> None:
    assert weighted_median([(3.0, 1), (1.0, 1), (2.0, 1)]) == 2.0
    assert weighted_median([(3.0, 5), (1.0, 1), (2.0, 1)]) == 3.0


def test_the_cost_is_a_line_over_the_context() -> None:
    fit = PrefillFit()
    for part in chunks(32_768):
        fit.observe(part, seconds_of(part))
    assert fit.cost is not None
    assert fit.cost.per_token == pytest.approx(A, rel=0.02)
    assert fit.cost.per_context == pytest.approx(B, rel=0.02)
    hit = PromptPart.between(8192, 24_576)
    assert fit.cost.seconds(hit) == pytest.approx(seconds_of(hit), rel=0.02)


def test_nothing_is_known_before_there_are_enough_steps() -> None:
    fit, part = PrefillFit(), PromptPart.between(0, 2048)
    for _ in range(7):
        fit.observe(part, seconds_of(part))
        fit.observe(PromptPart(), 1.0)
        fit.observe(part, 0.0)
        assert fit.cost is None
    fit.observe(part, seconds_of(part))
    assert fit.cost is not None


def test_single_slow_steps_change_nothing() -> None:
    fit, random = PrefillFit(), Random(7)
    fit.observe(PromptPart.between(0, 2048), 60.0)  # kernels are compiled
    for number in range(20):
        for part in chunks(16_384):
            slow = 20.0 if number % 5 == 4 else random.uniform(0.97, 1.03)
            fit.observe(part, slow * seconds_of(part))
    assert fit.cost is not None
    for hit in (PromptPart.between(0, 4096), PromptPart.between(4096, 16_384)):
        assert fit.cost.seconds(hit) == pytest.approx(seconds_of(hit), rel=0.08)


def test_short_prompts_do_not_displace_what_long_ones_have_cost() -> None:
    fit = PrefillFit()
    for part in chunks(16_384) * 3 + [PromptPart.between(0, 300)] * 1000:
        fit.observe(part, seconds_of(part))
    hit = PromptPart.between(0, 16_384)
    assert fit.cost is not None
    assert fit.cost.seconds(hit) == pytest.approx(seconds_of(hit), rel=0.03)


def test_contexts_that_were_never_measured_cost_no_more_than_the_longest() -> None:
    """A line through noise in short contexts says nothing of long ones."""
    fit = PrefillFit()
    for part, factor in [(PromptPart.between(0, 1024), 0.9), (PromptPart.between(1024, 2048), 1.1)] * 5:
        fit.observe(part, factor * seconds_of(part))
    hit = PromptPart.between(0, 100_000)
    assert fit.cost is not None
    assert fit.cost.seconds(hit) <= 1.1 * 100_000 * seconds_of(PromptPart.between(1024, 2048)) / 1024


@pytest.mark.parametrize("slope", [-3e-8, 0.0, 1e-6])
def test_no_figure_is_negative(slope: float) -> None:
    fit = PrefillFit()
    for part in chunks(16_384) * 3:
        fit.observe(part, max(1e-6, 1e-4 * part.tokens + slope * part.context - (0.2 if slope > 0 else 0.0)))
    assert fit.cost is not None
    assert min(fit.cost) >= 0
    assert fit.cost.seconds(PromptPart()) == 0.0


def test_the_speed_is_that_in_the_middle_of_the_contexts() -> None:
    assert PrefillCost(1e-4).tokens_per_second == pytest.approx(10_000)
    assert PrefillCost(1e-4, 1e-8, 20_000.0).tokens_per_second == pytest.approx(5_000)
    assert PrefillCost(0.0).tokens_per_second is None


def test_what_is_saved_never_falls_and_pays_for_waiting_first() -> None:
    stats = PrefillStats()
    saved = []
    for seconds, waited in [(0.0, 2.0), (3.0, 0.0), (0.0, 5.0), (1.0, 0.0), (10.0, 1.0)]:
        stats.count(tokens=10, seconds=seconds, waited=waited)
        saved.append(stats.seconds_saved)
    assert saved == [0.0, 1.0, 1.0, 1.0, 6.0]
    assert saved[-1] == stats.hit_seconds - stats.load_wait_seconds
    assert stats.hit_tokens == 50
