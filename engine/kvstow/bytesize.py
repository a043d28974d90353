"""Sizes in bytes, written for people: `8GiB`, `8Gi` as in Kubernetes, `2MiB`, `4096`."""

from __future__ import annotations

import re
from fractions import Fraction

from kvstow.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _number, _name in enumerate("kmgt", 1):
    _UNITS |= {_name: 1000**_number, _name + "b": 1000**_number}
    _UNITS |= {_name + "i": 1024**_number, _name + "ib": 1024**_number}
_PATTERN = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)", re.IGNORECASE)
_ALLOWED = (
    "a number of bytes, or a number with one of KiB MiB GiB TiB (powers of 1024) or kB MB GB TB, with or without the B"
)


def parse_size(text: str | int, key: str = "size") -> int:
    """The number of bytes that `text` stands for. Raises `ConfigError` with `key` for anything else, including bool.

    >>> parse_size("1.5KiB")
    1536
    """
    if isinstance(text, int):
        if isinstance(text, bool) or text < 0:
            raise ConfigError(key, text, _ALLOWED)
        return text
    match = _PATTERN.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(key, text, _ALLOWED)
    size = Fraction(match[1]) * unit
    if size.denominator != 1:
        raise ConfigError(key, text, "a whole number of bytes")
    return int(size)


def format_size(size: float) -> str:
    """`size` in the largest binary unit in which it is at least 1.

    >>> format_size(1536)
    '1.5 KiB'
    """
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.0f} B"
