"""The settings that can change while the engine runs: plan a change, make it."""

from __future__ import annotations

from typing import Annotated, TypeVar

from fastapi import Header, HTTPException
from starlette.concurrency import run_in_threadpool

from kvstow.errors import ConfigError, ConflictError
from kvstow_api.answers import PlanView
from kvstow_api.appstate import AppState
from kvstow_api.bodies import PoolPatch
from kvstow_api.directory import HostedPool
from kvstow_api.operations import Operation
from kvstow_api.readings import settings_etag

T = TypeVar("T")
IfMatch = Annotated[str | None, Header(description="An ETag: 412 if the settings have changed since it was given")]

_PLANNED = 1024  # blocks visited per hold of the engine's lock


def _check_match(pool: HostedPool, if_match: str | None) -> None:
    """Raises 412 if the settings have changed since the client read them."""
    etag = settings_etag(pool)
    if if_match is not None and not {"*", etag} & set(map(str.strip, if_match.split(","))):
        raise HTTPException(412, f"If-Match is {if_match[:100]}; the settings have changed, their ETag is {etag}")


async def plan(pool: HostedPool, patch: PoolPatch, if_match: str | None) -> PlanView:
    """What `change` would do. Raises what it would raise."""
    _check_match(pool, if_match)
    return await run_in_threadpool(_plan, pool, patch)


def _plan(pool: HostedPool, patch: PoolPatch) -> PlanView:
    """Visits every block above the new capacity, slice by slice."""
    _check(pool, patch)
    desired, policy = pool.facade.desired(), pool.facade.stats().pool.policy
    slot: int | None = patch.capacity_slots
    evicted = 0
    while slot is not None:
        page = pool.facade.blocks(slot, _PLANNED)
        if any(block.state == "protected" for block in page.blocks):
            raise ConflictError(f"protected blocks are above slot {patch.capacity_slots}; unprotect them first")
        evicted += len(page.blocks)
        slot = page.next_slot
    return PlanView(
        capacity_slots=_new(patch.capacity_slots, desired.capacity_slots),
        policy=_new(patch.policy, policy),
        pinning_paused=_new(patch.pinning_paused, desired.paused),
        evicted_slots=evicted,
        evicted_bytes=evicted * pool.facade.config.slot_bytes,
    )


async def change(app: AppState, pool: HostedPool, patch: PoolPatch, if_match: str | None) -> Operation | None:
    """Make the change if `if_match` allows it; a resize returns its operation. One change at a time: of two with the
    same ETag the second is refused. Raises before anything has changed."""
    admin = pool.facade.admin
    async with app.settings_lock:
        _check_match(pool, if_match)
        _check(pool, patch)
        operation = None
        capacity = patch.capacity_slots
        if capacity is not None:
            operation = app.operations.start("resize", pool.name, lambda: admin.resize(capacity))
        if patch.pinning_paused is not None:
            admin.pause_pinning(patch.pinning_paused)
        if patch.policy is not None:  # O(pool): all slots are copied in order of eviction
            await run_in_threadpool(admin.set_policy, patch.policy)
        return operation


def _check(pool: HostedPool, patch: PoolPatch) -> None:
    highest = pool.max_capacity_slots
    if patch.capacity_slots is None:
        return
    if not pool.is_resizable:
        raise ConflictError(f"the host sets the size of pool {pool.name}, by its memory and what its engines ask for")
    if patch.capacity_slots > highest:
        raise ConfigError("capacity_slots", patch.capacity_slots, f"1 to {highest}, the maximum of this host")


def _new(given: T | None, now: T) -> T:
    return now if given is None else given
