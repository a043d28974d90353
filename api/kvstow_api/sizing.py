"""Draws conclusions from a pool's curve: the next size that is worth its memory, and the smallest size that would do.

These rules and their words are only here, so that the API, the doctor, the status page and `kvstow top` say the same.
This module uses no web framework.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

from kvstow.bytesize import format_size
from kvstow.status import SizeCurve
from kvstow_api.answers import PoolCurveView, SizeView
from kvstow_api.texts import counted, duration, percent

GAIN = 0.02
"""A larger size is worth its memory if each doubling up to it adds this share of the blocks on average. The curve is
off by one point on average, and has never been off by more than three."""
LOSS = 0.005
"""A smaller size would do if it loses no more than this share in total."""
REST = 0.01
"""A size is the end of the curve if all larger sizes together would add less than this share."""
_MEMORY = {1: "twice the memory", 2: "four times the memory", 3: "eight times the memory"}
_PARTS = {-1: "half of it", -2: "a quarter of it", -3: "an eighth of it"}


def with_sizes(view: PoolCurveView, curve: SizeCurve, seconds_per_ratio: float | None) -> PoolCurveView:
    """Return `view` with the conclusions from `curve`. It is unchanged if the curve has no point near its size. The
    points are a doubling apart. `seconds_per_ratio` is how many seconds of prefill would be saved in a minute if all
    blocks hit, or None if unknown."""
    points = [point for point in curve.points if point.num_slots > 0]
    if not points or view.num_slots < 1:
        return view
    distances = [abs(math.log2(point.num_slots / view.num_slots)) for point in points]
    at = distances.index(min(distances))
    if distances[at] > 0.5:
        return view
    expected = [point.own for point in points]
    ratios = list(accumulate(expected, max))  # a larger pool does not hit less; where it seems to, the sample has noise
    slot_bytes = view.num_bytes // view.num_slots
    sizes = [
        SizeView(
            num_slots=point.num_slots,
            num_bytes=point.num_slots * slot_bytes,
            times=point.num_slots / points[at].num_slots,
            lru=point.lru,
            own=point.own,
            ratio=ratio,
        )
        for point, ratio in zip(points, ratios, strict=True)
    ]
    now, everything = sizes[at], max(curve.everything, ratios[-1])
    larger = enumerate(sizes[at + 1 :], 1)
    found = replace(
        view,
        requests=curve.requests,
        blocks=curve.blocks,
        items=sizes,
        everything=everything,
        next_useful=next((size for doublings, size in larger if size.ratio - now.ratio >= GAIN * doublings), None),
        enough=next((size for size in sizes[:at] if now.ratio - size.ratio <= LOSS), None),
        end=next((size for size in sizes[at:] if everything - size.ratio < REST), None),
    )
    seen = f"seen in the last {counted(curve.requests, 'request')}, {counted(curve.blocks, 'block')}"
    return replace(found, advice=f"{'; '.join(_parts(found, at, everything, seconds_per_ratio))} ({seen})")


def _parts(view: PoolCurveView, at: int, everything: float, seconds_per_ratio: float | None) -> list[str]:
    now, larger, smaller = view.items[at], view.next_useful, view.enough
    if everything < GAIN:
        return [f"no size would help: a pool that never evicts would hit {percent(everything)} of the blocks"]

    def named(size: SizeView) -> str:
        doublings = view.items.index(size) - at
        words = {**_MEMORY, **_PARTS}.get(doublings, f"{2.0**doublings:g} times the memory")
        return f"{words} ({format_size(size.num_bytes)})"

    parts = []
    if larger is not None:
        parts.append(
            f"{named(larger)} would add {_points(larger.ratio - now.ratio)} to the "
            f"{percent(now.ratio)} of blocks that hit{_worth(larger.ratio - now.ratio, seconds_per_ratio)}"
        )
        parts.append(_rest(view.end, larger, now, everything))
    if smaller is not None and (larger is None or now.ratio >= GAIN):
        parts.append(
            f"{named(smaller)} would do, and hit {percent(smaller.ratio)} of the blocks instead of {percent(now.ratio)}"
        )
    if not parts:
        parts.append(f"the size fits, and {percent(now.ratio)} of the blocks hit")
        if at > 0:
            parts.append(f"half of it would lose {_points(now.ratio - view.items[at - 1].ratio)}")
        if at + 1 < len(view.items):
            parts.append(f"twice the memory would add {_points(view.items[at + 1].ratio - now.ratio)}")
    return parts


def _rest(end: SizeView | None, larger: SizeView, now: SizeView, everything: float) -> str:
    if end is None:
        return f"a pool that never evicts would hit {percent(everything)}"
    if end == larger:
        return "above that less than a point is left"
    gain = _points(end.ratio - now.ratio)
    return f"{format_size(end.num_bytes)} would add {gain}, and above that less than a point is left"


def _worth(gain: float, seconds_per_ratio: float | None) -> str:
    return "" if seconds_per_ratio is None else f", {duration(gain * seconds_per_ratio)} of prefill a minute"


def _points(share: float) -> str:
    """
    >>> _points(0.09), _points(0.004), _points(0.01)
    ('9 points', '0.4 points', '1 point')
    """
    words = f"{100 * share:.1f}".removesuffix(".0")
    return f"{words} {'point' if words == '1' else 'points'}"
