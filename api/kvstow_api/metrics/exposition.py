"""The text of a scrape."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import isfinite

from prometheus_client import CollectorRegistry, Metric

from kvstow_api.metrics.families import Family, escaped

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SUFFIX = {"counter": "_total", "info": "_info"}
_TYPE = {"info": "gauge", "stateset": "gauge", "gaugehistogram": "histogram", "unknown": "untyped"}


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
