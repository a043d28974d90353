"""What follows from a curve for the size of a pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstow.status import CurveEvidence, CurvePoint, SizeCurve
from kvstow_api.answers import PoolCurveView
from kvstow_api.sizing import GAIN, LOSS, REST, too_early, with_sizes

NOW = 4096
GIB = 1 << 30
SLOT = 1 << 26  # 4,096 of them are 256 GiB


EVIDENCE = CurveEvidence(NOW, NOW, 2700, 160, 34_000, 16_384, 0.0)


def curve(ratios: Sequence[float], known: int = 10) -> SizeCurve:
    """Sizes from an eighth of the pool on, of which the first ones were full for long enough."""
    points = tuple(
        CurvePoint(NOW * 2**number // 8, ratio, 0.01, at_least=number >= known, seen_blocks=6000, seconds_left=300.0)
        for number, ratio in enumerate(ratios)
    )
    return SizeCurve(points, 2600, 33_280)


def view(num_slots: int = NOW) -> PoolCurveView:
    """Before there is a curve."""
    return PoolCurveView(
        pool="host", policy="auto", num_slots=num_slots, num_bytes=num_slots * SLOT, slot_bytes=SLOT, advice="no",
        requests=0, blocks=0, items=[],
    )  # fmt: skip


def sizing(ratios: Sequence[float], known: int = 10, *, seconds: float | None = None) -> PoolCurveView:
    found = with_sizes(view(), curve(ratios, known), EVIDENCE, seconds)
    assert len(found.items) == len(ratios)
    return found


def words(ratios: Sequence[float], known: int = 10, *, seconds: float | None = None) -> str:
    return sizing(ratios, known, seconds=seconds).advice


def test_a_larger_size_is_named_with_its_gain_its_worth_and_its_end() -> None:
    ratios = [0.05, 0.1, 0.15, 0.25, 0.34, 0.37, 0.374]
    assert words(ratios, seconds=344.4) == (
        "twice the memory (512 GiB) would add 9 points to the 25.0 % of blocks that hit, 31 s of prefill a minute; "
        "1 TiB would add 12 points, and above that less than a point is left "
        "(seen in the last 2,600 requests, 33,280 blocks)"
    )
    assert "; a pool of 2 TiB would hit 60.0 % (seen" in words([*ratios[:6], 0.6])


def test_a_size_that_was_not_full_for_long_enough_hits_at_least_what_it_hit() -> None:
    assert words([0.05, 0.1, 0.15, 0.25, 0.34, 0.37, 0.374], 4) == (
        "twice the memory (512 GiB) would add at least 9 points so far to the 25.0 % of blocks that hit; "
        "1 TiB would add at least 12 points, and above that less than a point is left so far "
        "(seen in the last 2,600 requests, 33,280 blocks)"
    )
    assert words([0.05, 0.1, 0.2, 0.25, 0.256, 0.26, 0.262], 4).startswith(
        "25.0 % of the blocks hit; half of it would lose 5 points; too early to tell what twice the memory would add: "
        "6,000 of 8,192 distinct blocks were seen that fill it; about 5m more at the pace so far (seen"
    )
    assert words([0.0] * 7, 5).startswith("no size would help so far: a pool of 2 TiB would hit 0.0 % of the blocks")


def test_nothing_follows_before_the_pool_was_full() -> None:
    """Not even that less would do: the pool may hit more when it has seen more."""
    evidence = CurveEvidence(3000, NOW, 100, 160, 2000, 16_384, 1200.0)
    found = with_sizes(view(), curve([0.1, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25], 3), evidence, None)
    assert found.advice == (
        "too early to tell: the pool has seen 3,000 of 4,096 distinct blocks that fill it; "
        "about 20m more at the pace so far"
    )
    assert (found.next_useful, found.enough, found.end, found.disk_advice) == (None, None, None, None)
    assert too_early(evidence._replace(seen=NOW, seconds_left=None)) == (
        "too early to tell: since the pool was full, 100 of 160 requests have begun, and they have looked up "
        "2,000 of 16,384 blocks"
    )


def test_what_a_disk_would_add_is_said_by_the_sizes_far_above_the_pool() -> None:
    ratios = [0.05, 0.1, 0.15, 0.25, 0.34, 0.37, 0.374, 0.45, 0.452, 0.453]
    told = "disks of 4 TiB below the memory would add {}to the 25.0 % of blocks that hit"
    assert sizing(ratios).disk_advice == told.format("20 points ")
    assert sizing(ratios, 5).disk_advice == told.format("at least 20 points so far ")
    assert sizing([0.25] * 10).disk_advice == "disks below the memory would add less than 2 points"
    assert sizing(ratios[:6]).disk_advice is None


def test_a_smaller_size_that_would_do_is_named() -> None:
    assert words([0.1, 0.247, 0.249, 0.25, 0.25, 0.25, 0.25]).startswith(
        "a quarter of it (64 GiB) would do, and hit 24.7 % of the blocks instead of 25.0 % (seen"
    )


def test_both_are_named_where_a_step_comes_later() -> None:
    found = words([0.1, 0.1, 0.1, 0.1, 0.1, 0.5, 0.5])
    assert found.startswith("four times the memory (1 TiB) would add 40 points to the 10.0 %")
    assert "; an eighth of it (32 GiB) would do" in found


def test_a_size_that_fits_says_what_its_neighbours_would_change() -> None:
    assert words([0.05, 0.1, 0.2, 0.25, 0.256, 0.26, 0.262]).startswith(
        "the size fits, and 25.0 % of the blocks hit; half of it would lose 5 points; "
        "twice the memory would add 0.6 points"
    )


def test_no_size_helps_prompts_that_never_repeat() -> None:
    assert words([0.0, 0.0, 0.0, 0.001, 0.001, 0.002, 0.003]).startswith(
        "no size would help: a pool of 2 TiB would hit 0.3 % of the blocks"
    )


def test_nothing_follows_where_the_curve_is_of_another_size() -> None:
    found = curve([0.1] * 7)
    assert with_sizes(view(NOW * 100), found, EVIDENCE, None) == view(NOW * 100)
    assert with_sizes(view(0), found, EVIDENCE, None) == view(0)
    assert with_sizes(view(), replace(found, points=()), EVIDENCE, None) == view()
    tiny = replace(found, points=(CurvePoint(0, 0.0), CurvePoint(1, 0.1), CurvePoint(2, 0.1)))
    assert with_sizes(view(2), tiny, EVIDENCE, None).items


# -- properties --------------------------------------------------------------------------------------------------------

ratios = st.lists(st.floats(0, 1), min_size=7, max_size=7)


@given(ratios, st.integers(4, 10))
@example([0.1, 0.2, 0.3, 0.4, 0.41, 0.42, 0.5], 7)
def test_nothing_is_recommended_for_less_than_the_gain_or_for_more_than_the_loss(
    given_ratios: list[float], known: int
) -> None:
    found = sizing(given_ratios, known)
    now, larger = found.items[3], found.next_useful
    if larger is not None:
        assert larger.num_slots > NOW
        assert larger.ratio - now.ratio >= GAIN * math.log2(larger.times)
        assert found.end is None or found.end.num_slots >= larger.num_slots
    if found.enough is not None:
        assert found.enough.num_slots < NOW
        assert now.ratio - found.enough.ratio <= LOSS
    if found.end is not None:
        assert found.end.num_slots >= NOW
        assert found.everything is not None
        assert found.everything - found.end.ratio < REST


@given(ratios)
def test_a_larger_pool_is_never_said_to_hit_less(given_ratios: list[float]) -> None:
    shown = [size.ratio for size in sizing(given_ratios).items]
    assert shown == sorted(shown)


@given(ratios, st.integers(4, 6), st.floats(0, 1))
def test_more_hits_of_larger_pools_recommend_no_larger_size(given_ratios: list[float], at: int, more: float) -> None:
    """Nothing that a larger size gains delays the next useful one."""
    better = [ratio if number < at else min(1.0, ratio + more) for number, ratio in enumerate(given_ratios)]
    before, after = sizing(given_ratios).next_useful, sizing(better).next_useful
    if before is not None:
        assert after is not None
        assert after.num_slots <= before.num_slots


@pytest.mark.parametrize("seconds", [None, 600.0])
@given(given_ratios=ratios)
def test_every_curve_has_one_sentence_that_says_what_it_rests_on(
    seconds: float | None, given_ratios: list[float]
) -> None:
    found = words(given_ratios, seconds=seconds)
    assert found.endswith("(seen in the last 2,600 requests, 33,280 blocks)")
    assert ". " not in found
