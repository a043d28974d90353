"""What the curve of a pool says about its size: the next size that is worth its memory, and the smallest that would do.

The one place of these rules and of their words: the API, the doctor, the status page and `kvstow top` read the same.
No web framework.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from kvstow.bytesize import format_size
from kvstow.status import Curve
from kvstow_api.texts import counted, duration, percent

GAIN = 0.02
"""A larger size is worth its memory if each doubling up to it adds this share of the blocks, on the average. The curve
is off by one point on the average, and never was by more than three."""
LOSS = 0.005
"""A smaller size would do if it loses no more than this share in all."""
REST = 0.01
"""A size is the end of the curve if all larger ones together would add less than this share."""
_MEMORY = {1: "twice the memory", 2: "four times the memory", 3: "eight times the memory"}
_PARTS = {-1: "half of it", -2: "a quarter of it", -3: "an eighth of it"}


class Size(NamedTuple):
    """A size of the pool on its curve. `doublings`: from the present size to this one. `ratio`: the share of blocks
    that it would hit."""

    num_slots: int
    doublings: int
    ratio: float


class Sizing(NamedTuple):
    """What follows from a curve. `next`: the smallest larger size that is worth its memory. `enough`: the smallest
    smaller size that would do. `end`: the smallest size, the present one or larger, above which nothing is gained that
    is worth a word. None: there is no such size on the curve. `everything`: of a pool that never evicts."""

    now: Size
    sizes: tuple[Size, ...]
    next: Size | None
    enough: Size | None
    end: Size | None
    everything: float
    requests: int
    blocks: int


def derive(curve: Curve, num_slots: int, policy: str) -> Sizing | None:
    """`num_slots`: of the pool now. None if the curve has no point at about this size. The points are a doubling
    apart."""
    points = [point for point in curve.points if point.num_slots > 0]
    if not points or num_slots < 1:
        return None
    distances = [abs(math.log2(point.num_slots / num_slots)) for point in points]
    at = distances.index(min(distances))
    if distances[at] > 0.5:
        return None
    # The curve keeps the present k for all sizes, while a pool that chooses it would take a better one.
    expected = [max(point.lru, point.own) if policy == "auto" else point.own for point in points]
    ratios = list(accumulate(expected, max))  # a larger pool does not hit less; that is noise of the sample
    sizes = tuple(
        Size(point.num_slots, number - at, ratio)
        for number, (point, ratio) in enumerate(zip(points, ratios, strict=True))
    )
    now, everything = sizes[at], max(curve.everything, ratios[-1])
    return Sizing(
        now=now,
        sizes=sizes,
        next=_next(sizes[at:]),
        enough=next((size for size in sizes[:at] if now.ratio - size.ratio <= LOSS), None),
        end=next((size for size in sizes[at:] if everything - size.ratio < REST), None),
        everything=everything,
        requests=curve.requests,
        blocks=curve.blocks,
    )


def _next(sizes: Sequence[Size]) -> Size | None:
    """The first one is the present size."""
    now = sizes[0]
    return next((size for size in sizes[1:] if size.ratio - now.ratio >= GAIN * size.doublings), None)


def advise(sizing: Sizing, slot_bytes: int, seconds_per_ratio: float | None) -> str:
    """One sentence. `slot_bytes`: on all ranks. `seconds_per_ratio`: seconds of prefill that all blocks would save in a
    minute if they hit; None if unknown."""
    seen = f"seen in the last {counted(sizing.requests, 'request')}, {counted(sizing.blocks, 'block')}"
    return f"{'; '.join(_parts(sizing, slot_bytes, seconds_per_ratio))} ({seen})"


def _parts(sizing: Sizing, slot_bytes: int, seconds_per_ratio: float | None) -> list[str]:
    now, larger, smaller = sizing.now, sizing.next, sizing.enough
    if sizing.everything < GAIN:
        return [f"no size would help: a pool that never evicts would hit {percent(sizing.everything)} of the blocks"]
    parts = []
    if larger is not None:
        parts.append(
            f"{_named(larger, slot_bytes)} would add {_points(larger.ratio - now.ratio)} to the "
            f"{percent(now.ratio)} of blocks that hit{_worth(larger.ratio - now.ratio, seconds_per_ratio)}"
        )
        parts.append(_rest(sizing, larger, slot_bytes))
    if smaller is not None and (larger is None or now.ratio >= GAIN):
        parts.append(
            f"{_named(smaller, slot_bytes)} would do, and hit {percent(smaller.ratio)} of the blocks "
            f"instead of {percent(now.ratio)}"
        )
    if not parts:
        parts.append(f"the size fits, and {percent(now.ratio)} of the blocks hit")
        neighbours = {size.doublings: size for size in sizing.sizes if abs(size.doublings) == 1}
        if (half := neighbours.get(-1)) is not None:
            parts.append(f"half of it would lose {_points(now.ratio - half.ratio)}")
        if (double := neighbours.get(1)) is not None:
            parts.append(f"twice the memory would add {_points(double.ratio - now.ratio)}")
    return parts


def _rest(sizing: Sizing, larger: Size, slot_bytes: int) -> str:
    """What sizes above the next useful one would add."""
    end = sizing.end
    if end is None:
        return f"a pool that never evicts would hit {percent(sizing.everything)}"
    if end == larger:
        return "above that less than a point is left"
    gain = _points(end.ratio - sizing.now.ratio)
    return f"{format_size(end.num_slots * slot_bytes)} would add {gain}, and above that less than a point is left"


def _named(size: Size, slot_bytes: int) -> str:
    words = {**_MEMORY, **_PARTS}.get(size.doublings, f"{2.0**size.doublings:g} times the memory")
    return f"{words} ({format_size(size.num_slots * slot_bytes)})"


def _worth(gain: float, seconds_per_ratio: float | None) -> str:
    return "" if seconds_per_ratio is None else f", {duration(gain * seconds_per_ratio)} of prefill a minute"


def _points(share: float) -> str:
    """
    >>> _points(0.09), _points(0.004), _points(0.01)
    ('9 points', '0.4 points', '1 point')
    """
    words = f"{100 * share:.1f}".removesuffix(".0")
    return f"{words} {'point' if words == '1' else 'points'}"
