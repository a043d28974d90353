"""Curves in one line of text."""

from __future__ import annotations

from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"
_GAP = " "


def sparkline(points: Sequence[float | None], width: int, top: float) -> str:
    """At most the newest `width` points, from 0 to `top`. Gaps are blank.

    >>> sparkline([0, 1, None, 4, 8], 4, 8)
    '▂ ▅█'
    >>> sparkline([0.0, 0.0], 4, 0.0)
    '▁▁'
    """
    shown = points[-width:] if width > 0 else []
    return "".join(_GAP if point is None else _level(point, top) for point in shown)


def _level(point: float, top: float) -> str:
    share = min(1.0, max(0.0, point / top)) if top > 0 else 0.0
    return _LEVELS[round(share * (len(_LEVELS) - 1))]
