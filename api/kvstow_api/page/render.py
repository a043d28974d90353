"""HTML of the status page, whose values Jinja2 escapes, and its SVG geometry: curves in a box of 300 by 48, and a bar
that is 1000 wide."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.resources import files
from itertools import groupby
from typing import NamedTuple

from jinja2 import Environment, PackageLoader

from kvstow_api.figures import CURVE_POINTS
from kvstow_api.page.content import Content

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


class SizePlot(NamedTuple):
    """Geometry of shares by size, in a box of 300 by 48 whose columns are equally wide: a polyline, and the middle of
    each column with the height of its share."""

    line: str
    spots: tuple[tuple[str, str], ...]


def size_plot(ratios: Sequence[float], top: float) -> SizePlot:
    spots = tuple(
        (f"{WIDTH * (2 * number + 1) / (2 * len(ratios)):.1f}", f"{_height(ratio, top):.1f}")
        for number, ratio in enumerate(ratios)
    )
    return SizePlot(" ".join(f"{x},{y}" for x, y in spots), spots)


SECTIONS = (
    "state",
    "memory",
    "pools",
    "sessions",
    "tier",
    "ranks",
    "slots",
    "charts",
    "sizes",
    "pending",
    "evictions",
    "events",
)
"""Sections that are updated separately. `sections.html` has a macro for each."""


class Renderer:
    """Compiles the templates when it is created, which takes tens of milliseconds: not for an event loop."""

    def __init__(self) -> None:
        environment = Environment(
            loader=PackageLoader("kvstow_api.page", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        environment.globals.update(bar=bar, polylines=polylines, size_plot=size_plot, num_points=CURVE_POINTS, zip=zip)
        self._page = environment.get_template("page.html")
        self._macros = environment.get_template("sections.html").module
        self._style, self._script = _asset("page.css"), _asset("page.js")

    def sections(self, content: Content) -> dict[str, str]:
        return {name: getattr(self._macros, name)(content).strip() for name in SECTIONS}

    def document(self, host_name: str, state: str, sections: Mapping[str, str]) -> str:
        """The whole page, from the host's name, its state and the output of `sections`."""
        return self._page.render(
            host_name=host_name, state=state, sections=sections, style=self._style, script=self._script
        )

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """Allow the browser to show the page, run its script, and connect to this server; nothing else."""
        policy = {
            "default-src": "'none'",
            "style-src": _digest(self._style),
            "script-src": _digest(self._script),
            "connect-src": "'self'",
            "img-src": "data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        text = "; ".join(f"{directive} {source}" for directive, source in policy.items())
        return {"Content-Security-Policy": text, "Referrer-Policy": "no-referrer"}


def _asset(name: str) -> str:
    """A file of this package without indentation."""
    text = files("kvstow_api.page").joinpath(name).read_text(encoding="utf-8")
    return re.sub(r"\n\s*", "\n", text).strip()


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
