"""The calls about pools: their settings, and what is removed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from kvstow_api.answers import POOL_NAME, OperationView, PinningView, PlanView, PoolsView, PoolView, RemovedView
from kvstow_api.client.call import Call, decoded, fields, get, if_matching, nothing, work


def pool_path(pool: str) -> str:
    return f"/v1/pools/{quote(pool, safe='')}"


def pools() -> Call[PoolsView]:
    return get("/v1/pools", PoolsView)


def pool(name: str = POOL_NAME) -> Call[PoolView]:
    return get(pool_path(name), PoolView)


def delete_pool(name: str) -> Call[None]:
    """Fails with status 409 while the pool has sessions."""
    return Call("DELETE", pool_path(name), nothing)


def change_pool(
    settings: Mapping[str, Any],
    *,
    if_match: str | None = None,
    wait: float | None = None,
    pool: str = POOL_NAME,
) -> Call[PoolView | OperationView]:
    """`settings`: new values by name, such as `policy`; what is left out stays. `if_match`: an `etag` seen before."""
    return work("PATCH", pool_path(pool), PoolView, wait, dict(settings), if_matching(if_match))


def plan_pool(settings: Mapping[str, Any], *, pool: str = POOL_NAME) -> Call[PlanView]:
    """What `change_pool` would do now."""
    return Call("PATCH", pool_path(pool), decoded(PlanView), body={**settings, "dry_run": True})


def resize(
    *,
    slots: int | None = None,
    num_bytes: int | None = None,
    if_match: str | None = None,
    wait: float | None = None,
    pool: str = POOL_NAME,
) -> Call[PoolView | OperationView]:
    """Set the pool's size on each rank, in slots or bytes."""
    settings = fields(capacity_slots=slots, capacity_bytes=num_bytes)
    return change_pool(settings, if_match=if_match, wait=wait, pool=pool)


def plan_resize(*, slots: int | None = None, num_bytes: int | None = None, pool: str = POOL_NAME) -> Call[PlanView]:
    """What `resize` would do now."""
    return plan_pool(fields(capacity_slots=slots, capacity_bytes=num_bytes), pool=pool)


def set_policy(policy: str, *, if_match: str | None = None, pool: str = POOL_NAME) -> Call[PoolView]:
    return Call("PATCH", pool_path(pool), decoded(PoolView), body={"policy": policy}, headers=if_matching(if_match))


def evict(
    *,
    slots: int | None = None,
    num_bytes: int | None = None,
    idle_seconds: float | None = None,
    dry_run: bool = False,
    wait: float | None = None,
    pool: str = POOL_NAME,
) -> Call[RemovedView | OperationView]:
    """Remove the coldest blocks. Takes exactly one of the first three arguments."""
    body = fields(slots=slots, bytes=num_bytes, idle_seconds=idle_seconds, dry_run=dry_run)
    return work("POST", f"{pool_path(pool)}/evict", RemovedView, wait, body)


def purge(
    *,
    everything: bool = False,
    keys: Sequence[str] | None = None,
    key_prefixes: Sequence[str] | None = None,
    idle_seconds: float | None = None,
    age_seconds: float | None = None,
    slots: int | None = None,
    num_bytes: int | None = None,
    dry_run: bool = False,
    wait: float | None = None,
    pool: str = POOL_NAME,
) -> Call[RemovedView | OperationView]:
    """Remove blocks by key, age or number. Takes exactly one selector."""
    body = fields(
        all=everything or None,
        keys=keys,
        key_prefixes=key_prefixes,
        idle_seconds=idle_seconds,
        age_seconds=age_seconds,
        slots=slots,
        bytes=num_bytes,
        dry_run=dry_run,
    )
    return work("POST", f"{pool_path(pool)}/purge", RemovedView, wait, body)


def retry_pinning(*, pool: str = POOL_NAME) -> Call[PinningView]:
    """Let ranks whose pinning failed try again."""
    return Call("POST", f"{pool_path(pool)}/retry", decoded(PinningView))


def pause_pinning(*, pool: str = POOL_NAME) -> Call[PoolView]:
    """Ranks pin no further chunk."""
    return Call("PATCH", pool_path(pool), decoded(PoolView), body={"pinning_paused": True})


def resume_pinning(*, pool: str = POOL_NAME) -> Call[PoolView]:
    return Call("PATCH", pool_path(pool), decoded(PoolView), body={"pinning_paused": False})
