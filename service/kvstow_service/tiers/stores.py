"""The store that a setting names."""

from __future__ import annotations

from kvstow.bytesize import parse_size
from kvstow.errors import ConfigError
from kvstow.tier.memorystore import MemoryStore
from kvstow.tier.store import TierStore
from kvstow_service.tiers import redislocation
from kvstow_service.tiers.mooncake import location as mooncake
from kvstow_service.tiers.mooncake.mooncakestore import MooncakeStore
from kvstow_service.tiers.redisstore import RedisStore

_MEMORY = "memory:"
_SHARED = "mooncake:// or redis://, which other nodes can reach; memory: is for replays"


def open_store(url: str, *, allows_memory: bool = False) -> TierStore:
    """`allows_memory`: the URL may be `memory:`, with a size or without limit, a store in this process. Waits for
    nothing: whether the store is there shows in the health of its clients. Raises `ConfigError`, or
    `MissingPackageError` if the store's library is not installed."""
    if url.startswith(_MEMORY):
        if not allows_memory:
            raise ConfigError("tier", url, _SHARED)
        size = url.removeprefix(_MEMORY)
        return MemoryStore(parse_size(size, "tier") if size else None)
    scheme = url.partition("://")[0]
    if scheme == mooncake.SCHEME:
        return MooncakeStore(mooncake.MooncakeLocation.parse(url))
    if scheme in redislocation.SCHEMES:
        return RedisStore(redislocation.RedisLocation.parse(url))
    raise ConfigError("tier", url, f"{mooncake.FORM}; {redislocation.FORM}; memory: or memory:SIZE for replays")
