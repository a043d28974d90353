"""Metric families out of plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from kvstow.stats import HistogramSnapshot

Row = tuple[Sequence[str], float]
"""Label values, and the value."""


def counter(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> CounterMetricFamily:
    """`name` without `_total`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def histogram(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], HistogramSnapshot]]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, snapshot in rows:
        buckets = list(zip(_written(snapshot.bounds), accumulate(snapshot.counts), strict=True))
        family.add_metric(values, buckets, snapshot.total)
    return family


@cache
def _written(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(floatToGoString, bounds), "+Inf")


def scalar(value: float) -> list[Row]:
    """The rows of a family without labels."""
    return [((), value)]


def by_label(counts: Mapping[str, float], *before: str) -> list[Row]:
    """One row per key, behind the label values `before`."""
    return [((*before, key), value) for key, value in counts.items()]
