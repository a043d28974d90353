"""Host names that a server accepts. Checked before a host imports a web framework."""

from __future__ import annotations

import re

from kvstow.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")


def parse_host_names(key: str, value: object) -> tuple[str, ...]:
    """From a list, or from text with commas or spaces between them. Raises `ConfigError`."""
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(
        isinstance(name, str) and _NAME.fullmatch(name) for name in names
    ):
        raise ConfigError(key, value, "a list of host names, each without a port")
    return tuple(normal_host(name) for name in names)


def normal_host(name: str) -> str:
    """Equal for names that mean the same host."""
    return name.lower().removesuffix(".")
