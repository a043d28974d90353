"""Parsing of durations such as `2ms`, `30s` and `0.5`."""

from __future__ import annotations

import math
import re

from kvstow.errors import ConfigError

_UNITS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_ALLOWED = "0 or more seconds, or a number with one of us ms s m min h"


def parse_duration(value: object, key: str = "duration") -> float:
    """`value`, a number or text, in seconds. Raises `ConfigError` for `key` if it is neither.

    >>> parse_duration("2ms")
    0.002
    """
    if isinstance(value, str) and (match := _PATTERN.fullmatch(value.strip().lower())) and match[2] in _UNITS:
        seconds = float(match[1]) * _UNITS[match[2]]
    else:
        seconds = float(str(value)) if type(value) in (int, float) else math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(key, value, _ALLOWED)
    return seconds
