"""Metric families made of plain numbers, and the text of a scrape.

Not prometheus_client's own exposition, which takes twice as long: for 8 ranks, on a machine with other work, 6.4 ms of
CPU (p50) and 9.8 to 12.9 ms (p99) instead of 3.2 and 4.9 to 7.5 ms. The event loop is blocked meanwhile, and its
probes wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from math import isfinite
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from kvstow.stats import Histogram

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Row = tuple[Sequence[str], float]
"""The label values and the value of a series."""

_SUFFIX = {"counter": "_total", "info": "_info"}
_TYPE = {"info": "gauge", "stateset": "gauge", "gaugehistogram": "histogram", "unknown": "untyped"}


class Series(NamedTuple):
    """The name and labels of a series; `text` as in a scrape."""

    name: str
    labels: tuple[tuple[str, str], ...]
    text: str


class Family(Metric):
    """A family whose series are cached from scrape to scrape, so that only values are new: prometheus_client validates
    and escapes the labels of every sample each time.

    `samples`, for readers other than `render`, are made on request.
    """

    def __init__(self, name: str, text: str, kind: str, rows: list[tuple[Series, float]]) -> None:
        super().__init__(name, text, kind)
        self.rows = rows

    @property
    def samples(self) -> list[Sample]:
        return [Sample(series.name, dict(series.labels), value) for series, value in self.rows]

    @samples.setter
    def samples(self, samples: list[Sample]) -> None:
        """Ignores the empty list that `Metric` begins with."""


def counter(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Family:
    """`name` without `_total`."""
    return Family(name, text, "counter", _rows(f"{name}_total", labels, rows))


def gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Family:
    return Family(name, text, "gauge", _rows(name, labels, rows))


def histogram(name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], Histogram]]) -> Family:
    found: list[tuple[Series, float]] = []
    for values, snapshot in rows:
        counts = list(accumulate(snapshot.counts))
        series = _histogram_series(name, tuple(labels), tuple(values), snapshot.bounds)
        found += zip(series, (*counts, counts[-1], snapshot.sum), strict=True)
    return Family(name, text, "histogram", found)


def scalar(value: float) -> list[Row]:
    """The only row of a family without labels."""
    return [((), value)]


def by_label(counts: Mapping[str, float], *before: str) -> list[Row]:
    """One row per item; the label values `before` come before its key."""
    return [((*before, key), value) for key, value in counts.items()]


def joined(rows: Iterable[Iterable[Row]]) -> list[Row]:
    return list(chain.from_iterable(rows))


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
    """The series of the buckets, the count and the sum."""
    ends = (*map(floatToGoString, bounds), "+Inf")
    buckets = (_series(f"{name}_bucket", (*labels, "le"), (*values, end)) for end in ends)
    return (*buckets, *(_series(f"{name}_{part}", labels, values) for part in ("count", "sum")))


def escaped(value: str) -> str:
    """A label value as written in a scrape."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


# -- the text of a scrape ---------------------------------------------------------------------------------------------


def render(registry: CollectorRegistry) -> bytes:
    """All families of the registry in Prometheus' text format, without `_created` samples."""
    return "".join(line for family in registry.collect() for line in _lines(family)).encode()


def _lines(family: Metric) -> Iterator[str]:
    yield _head(family.name, family.type, family.documentation)
    if isinstance(family, Family):
        for series, value in family.rows:
            yield f"{series.text} {_number(value)}\n"
        return
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            labels = ",".join(f'{name}="{escaped(value)}"' for name, value in sample.labels.items())
            yield f"{sample.name}{{{labels}}} {_number(sample.value)}\n"


@lru_cache(maxsize=1024)
def _head(name: str, kind: str, documentation: str) -> str:
    full = name + _SUFFIX.get(kind, "")
    text = documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {full} {text}\n# TYPE {full} {_TYPE.get(kind, kind)}\n"


def _number(value: float) -> str:
    if isfinite(value):
        return repr(value)
    return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
