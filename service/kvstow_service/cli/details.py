"""Views at full length: a line for each field, its unit taken from its name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from kvstow_api.numberformat import duration, field_text
from kvstow_api.views.stats import HistogramView, StatsView

_UNIT = re.compile(r"_(bytes_per_second|seconds|bytes)(?=_left$|$)")


def details_of(view: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Names and values of all fields, and of those within them."""
    for name, value in _fields(view):
        yield from entry_of(name, value, depth)


def entry_of(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """`value` under its name, with all that is within it."""
    label = "  " * depth + _UNIT.sub("", name).replace("_", " ")
    match value:
        case HistogramView():
            yield label, _summary(name, value)
        case Mapping() if value:
            yield label, ""
            for key, item in value.items():
                yield from entry_of(f"{key}_bytes" if name.endswith("_bytes") else key, item, depth + 1)
        case [first, *_] if is_dataclass(first):
            for number, item in enumerate(value):
                yield f"{label} {number}", ""
                yield from details_of(item, depth + 1)
        case _ if is_dataclass(value):
            yield label, ""
            yield from details_of(value, depth + 1)
        case _:
            yield label, "-" if value == {} else field_text(name, value)


def _fields(view: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(view, Mapping):
        yield from view.items()
        return
    for one in fields(view):
        value = getattr(view, one.name)
        if value is not None or not isinstance(view, StatsView):  # its sections that were not asked for
            yield one.name, value


def _summary(name: str, histogram: HistogramView) -> str:
    if not histogram.count:
        return "none"
    mean = histogram.sum / histogram.count
    return f"{histogram.count:,}, mean {field_text(name, mean) if 'bytes' in name else duration(mean)}"
