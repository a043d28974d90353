"""Figures over time: each is defined once, here, for the API, the status page, `kvstow top` and `kvstow plot`.

A figure is made of two samples of the counters: of neighbours in the history where it is drawn, and of the last seconds
for what it is now. Standard library only: clients draw them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Literal, NamedTuple

from kvstow_api.views.history import NOW_SECONDS, NowView, SampleView

Unit = Literal["ratio", "bytes", "bytes_per_second", "blocks_per_second"]

Figure = Callable[[SampleView, SampleView], float | None]
"""A figure of the time between two samples; None if it has no value."""


class Metric(NamedTuple):
    """Something to draw: a line or more, in one unit. `lines` has names of `FIGURES`."""

    unit: Unit
    lines: Mapping[str, str]


class Line(NamedTuple):
    """One figure over time; each point belongs to the interval that ends at its time. `figure`: its name."""

    name: str
    figure: str
    times: tuple[datetime, ...]
    points: tuple[float | None, ...]


def lines_of(metric: Metric, samples: Sequence[SampleView]) -> list[Line]:
    """The lines of `metric`, one point shorter than `samples`."""
    times = tuple(sample.time for sample in samples[1:])
    return [
        Line(name, figure, times, tuple(FIGURES[figure](before, after) for before, after in pairwise(samples)))
        for name, figure in metric.lines.items()
    ]


def now_of(samples: Sequence[SampleView]) -> NowView:
    """Every figure of the last `NOW_SECONDS` of `samples`, or of all of them where they are younger."""
    if not samples:
        return NowView(seconds=0.0, **dict.fromkeys(FIGURES))
    last = samples[-1]
    first = next(one for one in samples if (last.time - one.time).total_seconds() <= NOW_SECONDS)
    seconds = (last.time - first.time).total_seconds()
    return NowView(seconds=seconds, **{name: figure(first, last) for name, figure in FIGURES.items()})


def _growth(before: float, after: float) -> float | None:
    """Counters that shrink belong to two lives of the server."""
    return after - before if after >= before else None


def _per_second(name: str) -> Figure:
    def rate(before: SampleView, after: SampleView) -> float | None:
        growth = _growth(getattr(before, name), getattr(after, name))
        seconds = (after.time - before.time).total_seconds()
        return None if growth is None or seconds <= 0 else growth / seconds

    return rate


def _hit_ratio(before: SampleView, after: SampleView) -> float | None:
    queries = _growth(before.query_blocks, after.query_blocks)
    hits = _growth(before.hit_blocks, after.hit_blocks)
    return hits / queries if queries and hits is not None else None


def _usage(_: SampleView, after: SampleView) -> float | None:
    return after.used_slots / after.usable_slots if after.usable_slots else None


FIGURES: Mapping[str, Figure] = {
    "hit_ratio": _hit_ratio,
    "load_bytes_per_second": _per_second("load_bytes"),
    "store_bytes_per_second": _per_second("store_bytes"),
    "stored_blocks_per_second": _per_second("stored_blocks"),
    "evicted_blocks_per_second": _per_second("evicted_blocks"),
    "dropped_blocks_per_second": _per_second("dropped_blocks"),
    "used_ratio": _usage,
    "pinned_bytes": lambda _, after: float(after.pinned_bytes),
}
"""By the names of `NowView`'s fields, which describe them."""

METRICS: Mapping[str, Metric] = {
    "hit-ratio": Metric("ratio", {"hit ratio": "hit_ratio"}),
    "bandwidth": Metric("bytes_per_second", {"loads": "load_bytes_per_second", "stores": "store_bytes_per_second"}),
    "usage": Metric("ratio", {"slots in use": "used_ratio"}),
    "blocks": Metric(
        "blocks_per_second",
        {
            "stored": "stored_blocks_per_second",
            "evicted for room": "evicted_blocks_per_second",
            "dropped": "dropped_blocks_per_second",
        },
    ),
    "pinned": Metric("bytes", {"pinned": "pinned_bytes"}),
}
"""What the history can show."""
