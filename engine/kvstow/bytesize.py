"""Sizes in bytes, written for people: `8GiB`, `8Gi` as in Kubernetes, `2MiB`, `4096`."""

from __future__ import annotations

import re
from fractions import Fraction

from kvstow.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    **{name: 1 << (10 * number) for number, name in enumerate(("ki", "mi", "gi", "ti"), 1)},
    **{name: 10 ** (3 * number) for number, name in enumerate("kmgt", 1)},
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_PATTERN = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)", re.IGNORECASE)
_ALLOWED = (
    "a number of bytes, or a number with one of KiB MiB GiB TiB (powers of 1024) or kB MB GB TB, with or without the B"
)


def parse_size(text: str | int, key: str = "size") -> int:
    """The number of bytes that `text` stands for. Raises `ConfigError` with `key` for anything else, including bool.

    >>> parse_size("1.5KiB")
    1536
    """
    if isinstance(text, bool):
        raise ConfigError(key, text, _ALLOWED)
    if isinstance(text, int):
        if text < 0:
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
