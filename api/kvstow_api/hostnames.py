"""Host names that a server accepts. Imports no web framework: settings are checked before one is loaded."""

from __future__ import annotations

import ipaddress
import re

from kvstow.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")


def parse_host_names(key: str, value: object) -> tuple[str, ...]:
    """From a list, or from text separated by commas or spaces. Raises `ConfigError`."""
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(
        isinstance(name, str) and _NAME.fullmatch(name) for name in names
    ):
        raise ConfigError(key, value, "a list of host names without ports")
    return tuple(normal_host(name) for name in names)


def normal_host(name: str) -> str:
    """Equal for spellings of the same host name."""
    return name.lower().removesuffix(".")


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
