"""The store that a setting names."""

from __future__ import annotations

from kvstow.errors import ConfigError
from kvstow.tier.store import TierStore
from kvstow_service.tiers import redislocation
from kvstow_service.tiers.mooncake import location as mooncake
from kvstow_service.tiers.mooncake.mooncakestore import MooncakeStore
from kvstow_service.tiers.redisstore import RedisStore


def open_store(url: str) -> TierStore:
    """Waits for nothing: whether the store is there shows in the health of its clients. Raises `ConfigError`, or
    `MissingPackageError` if the store's library is not installed."""
    scheme = url.partition("://")[0]
    if scheme == mooncake.SCHEME:
        return MooncakeStore(mooncake.MooncakeLocation.parse(url))
    if scheme in redislocation.SCHEMES:
        return RedisStore(redislocation.RedisLocation.parse(url))
    raise ConfigError("tier", url, f"{mooncake.FORM}; {redislocation.FORM}")
