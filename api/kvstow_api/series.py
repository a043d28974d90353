"""Figures over time, made of the samples that the history keeps. Standard library only: clients draw them, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Literal, NamedTuple

from kvstow_api.views.history import SampleView

Unit = Literal["ratio", "bytes", "bytes_per_second", "blocks_per_second"]

Figure = Callable[[SampleView, SampleView], float | None]
"""A figure of the time from one sample to the next; None where there is none."""


class Metric(NamedTuple):
    """Something to draw: a line or more, in one unit."""

    unit: Unit
    lines: Mapping[str, Figure]


class Line(NamedTuple):
    """One figure over time; each point belongs to the interval that ends at its time."""

    name: str
    times: tuple[datetime, ...]
    points: tuple[float | None, ...]


def lines_of(metric: Metric, samples: Sequence[SampleView]) -> list[Line]:
    """The lines of `metric`, one point shorter than `samples`."""
    times = tuple(sample.time for sample in samples[1:])
    return [
        Line(name, times, tuple(figure(before, after) for before, after in pairwise(samples)))
        for name, figure in metric.lines.items()
    ]


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


METRICS: Mapping[str, Metric] = {
    "hit-ratio": Metric("ratio", {"hit ratio": _hit_ratio}),
    "bandwidth": Metric("bytes_per_second", {"loads": _per_second("load_bytes"), "stores": _per_second("store_bytes")}),
    "usage": Metric("ratio", {"slots in use": _usage}),
    "blocks": Metric(
        "blocks_per_second",
        {
            "stored": _per_second("stored_blocks"),
            "evicted": _per_second("evicted_blocks"),
            "dropped": _per_second("dropped_blocks"),
        },
    ),
    "pinned": Metric("bytes", {"pinned": lambda _, after: float(after.pinned_bytes)}),
}
"""What the history can show. Bandwidth is of one rank, pinned bytes of all."""
