"""Metric families out of plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from kvstow.stats import HistogramSnapshot

Row = tuple[Sequence[str], float]
"""Label values, and the value."""


class Series(NamedTuple):
    """What a sample is called; `text` as a scrape has it."""

    name: str
    labels: tuple[tuple[str, str], ...]
    text: str


class Family(Metric):
    """A family whose series are remembered from scrape to scrape: only their values are new.

    prometheus_client checks and escapes every label name and value of every sample anew, 2.7 ms for 8 ranks.
    `samples`, for readers other than `exposition`, are made when they are asked for.
    """

    def __init__(self, name: str, text: str, kind: str, rows: list[tuple[Series, float]]) -> None:
        super().__init__(name, text, kind)
        self.rows = rows

    @property
    def samples(self) -> list[Sample]:
        return [Sample(series.name, dict(series.labels), value) for series, value in self.rows]

    @samples.setter
    def samples(self, samples: list[Sample]) -> None:
        """`Metric` begins with none."""


def counter(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Family:
    """`name` without `_total`."""
    return Family(name, text, "counter", _rows(f"{name}_total", labels, rows))


def gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Family:
    return Family(name, text, "gauge", _rows(name, labels, rows))


def histogram(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], HistogramSnapshot]]
) -> Family:
    found: list[tuple[Series, float]] = []
    for values, snapshot in rows:
        counts = list(accumulate(snapshot.counts))
        series = _histogram_series(name, tuple(labels), tuple(values), snapshot.bounds)
        found += zip(series, (*counts, counts[-1], snapshot.sum), strict=True)
    return Family(name, text, "histogram", found)


def scalar(value: float) -> list[Row]:
    """The rows of a family without labels."""
    return [((), value)]


def by_label(counts: Mapping[str, float], *before: str) -> list[Row]:
    """One row per key, behind the label values `before`."""
    return [((*before, key), value) for key, value in counts.items()]


def _rows(name: str, labels: Sequence[str], rows: Iterable[Row]) -> list[tuple[Series, float]]:
    names = tuple(labels)
    return [(_series(name, names, tuple(values)), value) for values, value in rows]


@lru_cache(maxsize=8192)
def _series(name: str, labels: tuple[str, ...], values: tuple[str, ...]) -> Series:
    pairs = tuple(zip(labels, values, strict=True))
    text = ",".join(f'{label}="{escaped(value)}"' for label, value in pairs)
    return Series(name, pairs, f"{name}{{{text}}}" if pairs else name)


@lru_cache(maxsize=1024)
def _histogram_series(
    name: str, labels: tuple[str, ...], values: tuple[str, ...], bounds: tuple[float, ...]
) -> tuple[Series, ...]:
    """Of its buckets, its count and its sum."""
    ends = (*map(floatToGoString, bounds), "+Inf")
    buckets = (_series(f"{name}_bucket", (*labels, "le"), (*values, end)) for end in ends)
    return (*buckets, *(_series(f"{name}_{part}", labels, values) for part in ("count", "sum")))


def escaped(value: str) -> str:
    """A label's value as it stands in a scrape."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
