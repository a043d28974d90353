"""The store that a setting names."""

from __future__ import annotations

from kvstow.bytesize import parse_size
from kvstow.errors import ConfigError
from kvstow.tier.memorystore import MemoryStore
from kvstow.tier.store import TierStore

_FORMS = "memory: or memory:SIZE, such as memory:8GiB"


def open_store(url: str, key: str) -> TierStore:
    """`key` names the setting in errors. Raises `ConfigError` for a URL that names no store."""
    scheme, colon, rest = url.partition(":")
    if scheme != "memory" or not colon:
        raise ConfigError(key, url, _FORMS)
    return MemoryStore(parse_size(rest, key) if rest else None)
