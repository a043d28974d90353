"""What the settings of a host may be. Imports no web framework: settings are checked before one is loaded."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

from kvstow.errors import ConfigError, SettingError

INFORMATIONAL_CHECKS = ("pool", "pinned")
"""Checks that fail `/readyz` only if the host requires them."""

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


def require_token(host: str | None, token_file: Path | None, *, certificates: bool = False) -> None:
    """Raises `SettingError` if `host` is reachable from other machines without a token or a client certificate. None
    stands for a Unix socket."""
    if token_file is None and not certificates and host is not None and not is_loopback(host):
        raise SettingError("host", host, "is reachable from other machines: set token_file or tls_client_ca")
