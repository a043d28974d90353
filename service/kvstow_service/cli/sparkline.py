"""Curves in one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_LEVELS = "▁▂▃▄▅▆▇█"
_GAP = " "


def sparkline(points: Sequence[float | None], width: int, top: float | None = None) -> str:
    """At most the newest `width` points, from 0 to `top` (by default the highest of them). Gaps are blank.

    >>> sparkline([0, 1, None, 4, 8], 4)
    '▂ ▅█'
    >>> sparkline([0.0, 0.0], 4)
    '▁▁'
    """
    shown = points[-width:] if width > 0 else []
    highest = top if top is not None else max((point for point in shown if point is not None), default=0.0)
    return "".join(_GAP if point is None else _level(point, highest) for point in shown)


def squeeze(points: Sequence[float | None], width: int) -> list[float | None]:
    """At most `width` points: the means of neighbours."""
    if len(points) <= width:
        return list(points)
    cuts = [len(points) * number // width for number in range(width + 1)]
    return [_mean(points[begin:end]) for begin, end in pairwise(cuts)]


def _mean(points: Sequence[float | None]) -> float | None:
    there = [point for point in points if point is not None]
    return sum(there) / len(there) if there else None


def _level(point: float, highest: float) -> str:
    share = min(1.0, max(0.0, point / highest)) if highest > 0 else 0.0
    return _LEVELS[round(share * (len(_LEVELS) - 1))]
