"""Lines over time as SVG: the points of polylines, in a box of 300 by 48."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kvstow_api.history import Line

WIDTH, HEIGHT = 300, 48
_MARGIN = 2  # so that a stroke at the edge is whole


@dataclass(frozen=True, slots=True)
class Chart:
    """`lines`: for each line its name, what it says now, and its polylines: one for each run without a gap. `note`:
    what the box spans."""

    label: str
    lines: tuple[tuple[str, str, tuple[str, ...]], ...]
    note: str


def polylines(line: Line, points: int, top: float) -> tuple[str, ...]:
    """From 0 to `top`, the newest point at the right edge; `points` fill the box."""
    shown = line.points[-points:]
    step = WIDTH / max(points - 1, 1)
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
