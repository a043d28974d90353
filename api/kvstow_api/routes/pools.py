"""Pools: their settings, and what operators do with their blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Header, HTTPException, Query, Response
from starlette.concurrency import run_in_threadpool

from kvstow.errors import ConfigError, ConflictError, NotFoundError
from kvstow.keys import parse_key
from kvstow_api.body import StrictRoute
from kvstow_api.openapi import Responses, changing, reading
from kvstow_api.operations import Operation, OperationKind, Sweeping
from kvstow_api.schemas.operations import OperationView
from kvstow_api.schemas.pools import (
    POOL_NAME,
    EvictBody,
    PinBody,
    PinView,
    PoolPatch,
    PoolPlan,
    PoolsView,
    PoolView,
    PurgeBody,
    RemovedView,
    RetryView,
    UnpinBody,
    WaitQuery,
)
from kvstow_api.services import Services, Use

router = APIRouter(prefix="/v1/pools", tags=["pools"], route_class=StrictRoute)

_PLANNED = 1024  # blocks looked at per hold of the engine's lock

_ACCEPTED: Responses = {202: {"model": OperationView, "description": "It goes on as an operation"}}


async def existing_pool(pool: str) -> str:
    """The name of a pool that exists."""
    if pool != POOL_NAME:
        raise NotFoundError(f"there is no pool {pool!r}; there is: {POOL_NAME}")
    return pool


PoolName = Annotated[str, Depends(existing_pool)]
Wait = Annotated[WaitQuery, Query()]


@router.get("", responses=reading())
async def list_pools(use: Use) -> PoolsView:
    """All pools."""
    return PoolsView(items=[_view(use)])


@router.get("/{pool}", responses=reading(404))
async def get_pool(use: Use, pool: PoolName, response: Response) -> PoolView:
    """One pool. The ETag names its settings: capacity and policy."""
    response.headers["ETag"] = _etag(use)
    return _view(use)


@router.patch("/{pool}", response_model=PoolView | PoolPlan, responses={**_ACCEPTED, **changing(404, 409, 412)})
async def change_pool(
    use: Use,
    pool: PoolName,
    body: PoolPatch,
    query: Wait,
    response: Response,
    if_match: Annotated[str | None, Header()] = None,
) -> PoolView | PoolPlan | Response:
    """Resize the pool, or change its policy."""
    if if_match is not None and not {"*", _etag(use)} & set(map(str.strip, if_match.split(","))):
        raise HTTPException(412, f"the settings have changed; their ETag is {_etag(use)}")
    capacity = _new_capacity(use, body)
    if body.dry_run:
        return await run_in_threadpool(_plan, use, capacity, body.policy)
    if capacity is not None:
        operation = use.operations.start("resize", lambda: use.engine.admin.resize(capacity))
    if body.policy is not None:  # takes as long as the pool is large: it is copied in order of eviction
        await run_in_threadpool(use.engine.admin.set_policy, body.policy)
    if capacity is not None and not await _has_succeeded(operation, query.wait):
        return _accepted(operation)
    response.headers["ETag"] = _etag(use)
    return _view(use)


@router.post("/{pool}/evict", response_model=RemovedView, responses={**_ACCEPTED, **changing(404)})
async def evict(use: Use, pool: PoolName, body: EvictBody, query: Wait) -> RemovedView | Response:
    """Remove the coldest blocks. Blocks that are leased or pinned stay."""
    make = partial(
        use.engine.admin.evict,
        slots=body.slots,
        num_bytes=body.num_bytes,
        idle_seconds=body.idle_seconds,
        dry_run=body.dry_run,
    )
    return await _remove(use, "evict", make, body.dry_run, query.wait)


@router.post("/{pool}/purge", response_model=RemovedView, responses={**_ACCEPTED, **changing(404)})
async def purge(use: Use, pool: PoolName, body: PurgeBody, query: Wait) -> RemovedView | Response:
    """Remove blocks by name or by age. What a transfer holds leaves at once, its slot when the transfer ends."""
    make = partial(
        use.engine.admin.purge,
        everything=bool(body.everything),
        keys=None if body.keys is None else _parse(body.keys),
        key_prefixes=None if body.key_prefixes is None else _parse(body.key_prefixes),
        idle_seconds=body.idle_seconds,
        age_seconds=body.age_seconds,
        slots=body.slots,
        num_bytes=body.num_bytes,
        dry_run=body.dry_run,
    )
    return await _remove(use, "purge", make, body.dry_run, query.wait)


@router.post("/{pool}/pin", responses=changing(404))
def pin(use: Use, pool: PoolName, body: PinBody) -> PinView:
    """Keep blocks from eviction. A new pin replaces an old one."""
    return PinView.model_validate(use.engine.admin.pin(_parse(body.keys), body.ttl_seconds))


@router.post("/{pool}/unpin", responses=changing(404))
def unpin(use: Use, pool: PoolName, body: UnpinBody) -> PinView:
    """End the pins of some blocks, or of all."""
    keys = None if body.keys is None else _parse(body.keys)
    return PinView.model_validate(use.engine.admin.unpin(keys))


@router.post("/{pool}/retry", status_code=202, responses=changing(404, body=False))
async def retry(use: Use, pool: PoolName) -> RetryView:
    """Ranks whose pinning failed try again."""
    use.engine.admin.retry_pinning()
    return RetryView.model_validate(use.engine.desired())


def _view(use: Services) -> PoolView:
    return PoolView.of(
        use.engine.stats(),
        max_capacity_slots=use.context.max_capacity_slots,
        num_ranks=use.engine.config.num_ranks,
    )


def _etag(use: Services) -> str:
    stats = use.engine.stats()
    return f'"{stats.capacity_slots}-{stats.policy}"'


def _parse(keys: list[str]) -> list[bytes]:
    return [parse_key(key) for key in keys]


def _new_capacity(use: Services, body: PoolPatch) -> int | None:
    """The capacity in slots that `body` asks for, if it does. Raises `ConfigError` if the host cannot have it."""
    slot_bytes, highest = use.engine.config.slot_bytes, use.context.max_capacity_slots
    if body.capacity_bytes is not None:
        if not slot_bytes <= body.capacity_bytes < (highest + 1) * slot_bytes:
            allowed = f"{slot_bytes} (one slot) to {highest * slot_bytes}, the maximum of this host"
            raise ConfigError("capacity_bytes", body.capacity_bytes, allowed)
        return body.capacity_bytes // slot_bytes
    if body.capacity_slots is not None and body.capacity_slots > highest:
        raise ConfigError("capacity_slots", body.capacity_slots, f"1 to {highest}, the maximum of this host")
    return body.capacity_slots


def _plan(use: Services, capacity: int | None, policy: str | None) -> PoolPlan:
    """What a change would do. Looks at every block above the new capacity, slice by slice."""
    stats = use.engine.stats()
    slot: int | None = capacity
    evicted = 0
    while slot is not None:
        page = use.engine.blocks(slot, _PLANNED)
        if any(block.state == "pinned" for block in page.blocks):
            raise ConflictError(f"pinned blocks lie above slot {capacity}; unpin them first")
        evicted += len(page.blocks)
        slot = page.next_slot
    return PoolPlan(
        capacity_slots=stats.capacity_slots if capacity is None else capacity,
        policy=policy or stats.policy,
        evicted_slots=evicted,
        evicted_bytes=evicted * stats.slot_bytes,
    )


async def _remove(
    use: Services, kind: OperationKind, make_sweep: Callable[[], Sweeping], dry_run: bool, wait: float
) -> RemovedView | Response:
    operation = use.operations.start(kind, make_sweep, dry_run=dry_run)
    if await _has_succeeded(operation, wait):
        return RemovedView.model_validate(operation.view.result)
    return _accepted(operation)


async def _has_succeeded(operation: Operation, wait: float) -> bool:
    """Whether it ended well within `wait` seconds; False while it runs. Raises for another end."""
    view = await operation.wait(wait)
    if view.state == "cancelled":
        raise ConflictError(f"operation {view.id} was cancelled")
    if view.state == "failed":
        raise operation.failure or HTTPException(500, f"operation {view.id} failed: {view.error}")
    return view.state == "succeeded"


def _accepted(operation: Operation) -> Response:
    view = OperationView.model_validate(operation.view)
    headers = {"Location": f"/v1/operations/{view.id}", "Retry-After": "1"}
    return Response(view.model_dump_json(), 202, headers, "application/json")
