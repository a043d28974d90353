"""The calls about single blocks of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from kvstow.status import BlockStatus, LookupResult, ProtectionResult
from kvstow_api.answers import POOL_NAME, BlockState, BlocksView
from kvstow_api.client.call import Call, decoded, get, nothing, params
from kvstow_api.client.poolcalls import pool_path


def blocks(
    *,
    state: BlockState | None = None,
    namespace: str | None = None,
    page_size: int | None = None,
    page_token: str | None = None,
    pool: str = POOL_NAME,
) -> Call[BlocksView]:
    given = {"state": state, "namespace": namespace, "page_size": page_size, "page_token": page_token}
    return get(f"{pool_path(pool)}/blocks", BlocksView, **given)


def block(key: str, *, pool: str = POOL_NAME) -> Call[BlockStatus]:
    return get(f"{pool_path(pool)}/blocks/{quote(key, safe='')}", BlockStatus)


def remove_block(key: str, *, pool: str = POOL_NAME) -> Call[None]:
    """Fails with status 409 while the block is in use or protected."""
    return Call("DELETE", f"{pool_path(pool)}/blocks/{quote(key, safe='')}", nothing)


def lookup(keys: Sequence[str], *, pool: str | None = None) -> Call[LookupResult]:
    """Which of the keys are in the pool. Holds no block and is not counted. At most 4,096 keys; more than
    64 KiB of them need an admin's credential or the Unix socket."""
    return Call("POST", "/v1/lookup", decoded(LookupResult), params(pool=pool), body={"keys": list(keys)})


def protect(keys: Sequence[str], *, ttl_seconds: float | None = None, pool: str = POOL_NAME) -> Call[ProtectionResult]:
    body = {"keys": list(keys), "ttl_seconds": ttl_seconds}
    return Call("POST", f"{pool_path(pool)}/protect", decoded(ProtectionResult), body=body)


def unprotect(keys: Sequence[str] | None, *, pool: str = POOL_NAME) -> Call[ProtectionResult]:
    """None: all blocks."""
    body = {"all": True} if keys is None else {"keys": list(keys)}
    return Call("POST", f"{pool_path(pool)}/unprotect", decoded(ProtectionResult), body=body)
