"""SVG geometry of the status page: curves in a box of 300 by 48, and a bar that is 1000 wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

WIDTH, HEIGHT = 300, 48
_MARGIN = 2  # for the width of a stroke at the edge
_BAR = 1000
_LEAST = 4  # so that every state with a slot is visible


class Part(NamedTuple):
    """A part of the bar of slots."""

    name: str
    slots: int
    begin: int
    width: int


def bar(counts: Mapping[str, int]) -> tuple[Part, ...]:
    """Parts as wide as their share."""
    total, begin, parts = sum(counts.values()), 0, []
    for name, count in counts.items():
        width = min(max(_LEAST, round(count * _BAR / total)), _BAR - begin) if count else 0
        parts.append(Part(name, count, begin, width))
        begin += width
    return tuple(parts)


def polylines(points: Sequence[float | None], count: int, top: float) -> tuple[str, ...]:
    """One polyline for each run of points without a gap, from 0 to `top`. `count` points fill the box; the newest is at
    its right edge."""
    shown = points[-count:]
    step = WIDTH / max(count - 1, 1)
    left = WIDTH - step * (len(shown) - 1)
    placed = [(left + step * number, point) for number, point in enumerate(shown)]
    runs = groupby(placed, key=lambda place: place[1] is not None)
    return tuple(" ".join(_spots(list(run), top)) for there, run in runs if there)


def _spots(run: Sequence[tuple[float, float | None]], top: float) -> list[str]:
    spots = [f"{x:.0f},{_height(point or 0.0, top):.1f}" for x, point in run]
    return spots if len(spots) > 1 else [spots[0], f"{run[0][0] + 1:.0f},{spots[0].partition(',')[2]}"]


def _height(point: float, top: float) -> float:
    share = min(1.0, point / top) if top > 0 else 0.0
    return _MARGIN + (HEIGHT - 2 * _MARGIN) * (1 - share)
