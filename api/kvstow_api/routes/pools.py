"""Pools and their blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

from fastapi import Depends, Path, Query, Request, Response

from kvstow.control.administration import Sweep
from kvstow.control.engine import PoolFacade
from kvstow.control.pool import SLICE_SLOTS
from kvstow.errors import ConfigError, NotFoundError
from kvstow.keys import format_key
from kvstow.status import BlockPage, BlockStatus, LookupResult, ProtectionResult
from kvstow_api import livesettings
from kvstow_api.answers import (
    POOL_NAME,
    BlocksView,
    OperationKind,
    PinningView,
    PlanView,
    PoolsView,
    PoolView,
    RemovedView,
)
from kvstow_api.appstate import App, AppState
from kvstow_api.bodies import EvictBody, Key, LookupBody, PoolPatch, ProtectBody, PurgeBody, UnprotectBody
from kvstow_api.directory import HostedPool
from kvstow_api.openapi import ETAG, changing, reading
from kvstow_api.poolchoice import choose_pool, find_pool
from kvstow_api.queries import BlocksQuery, PoolQuery, StrictRouter, WorkQuery, token_of
from kvstow_api.readings import pool_view, pool_views
from kvstow_api.requests import CHANGED_NOTHING
from kvstow_api.routes.operations import ACCEPTED, accepted, has_succeeded

router = StrictRouter(prefix="/v1", tags=["pools"])


async def _named_pool(app: App, pool: Annotated[str, Path(description="Its name", examples=[POOL_NAME])]) -> HostedPool:
    return find_pool(app.directory, pool)


Pool = Annotated[HostedPool, Depends(_named_pool)]
BlockKey = Annotated[Key, Path(description="The whole key, as hex", examples=["00003d2c1b0a"])]
Wait = Annotated[WorkQuery, Query()]

_MAX_SLICES = 16  # slices of slots searched for one page: bounds the cost of a sparse pool
_MAX_BLOCKS = 4096  # blocks searched for one page of a state or a namespace: some ms


@router.get("/pools", responses=reading())
async def list_pools(app: App) -> PoolsView:
    """All pools."""
    return PoolsView(items=pool_views(app.directory, app.sampler))


@router.get("/pools/{pool}", responses={**ETAG, **reading(404)})
async def get_pool(app: App, pool: Pool, response: Response) -> PoolView:
    """One pool. The ETag names its settings."""
    view = pool_view(app.directory, app.sampler, pool)
    response.headers["ETag"] = view.etag
    return view


@router.patch(
    "/pools/{pool}", response_model=PoolView | PlanView, responses={**ETAG, **ACCEPTED, **changing(404, 409, 412)}
)
async def change_pool(
    app: App,
    request: Request,
    pool: Pool,
    body: PoolPatch,
    query: Wait,
    response: Response,
    if_match: livesettings.IfMatch = None,
) -> PoolView | PlanView | Response:
    """Resize the pool, change its policy, or pause pinning."""
    patch = _in_slots(pool, body)
    if body.dry_run:
        request.scope[CHANGED_NOTHING] = True
        return await livesettings.plan(pool, patch, if_match)
    operation = await livesettings.change(app, pool, patch, if_match)
    if operation is not None and not await has_succeeded(operation, query.wait):
        return accepted(operation)
    return await get_pool(app, pool, response)


@router.delete("/pools/{pool}", status_code=204, responses=changing(404, 409, body=False))
def delete_pool(app: App, pool: Pool) -> Response:
    """Delete a pool that no session uses, with all its blocks. Its memory is for other pools as soon as no process can
    reach it."""
    app.directory.delete_pool(pool.name)
    return Response(status_code=204)


@router.post("/pools/{pool}/evict", response_model=RemovedView, responses={**ACCEPTED, **changing(404, 409)})
async def evict(app: App, request: Request, pool: Pool, body: EvictBody, query: Wait) -> RemovedView | Response:
    """Remove the coldest blocks. Leased and protected blocks stay."""
    make = partial(
        pool.facade.admin.evict,
        slots=body.slots,
        num_bytes=body.num_bytes,
        idle_seconds=body.idle_seconds,
        dry_run=body.dry_run,
    )
    request.scope[CHANGED_NOTHING] = body.dry_run
    return await _remove(app, "evict", pool, make, body.dry_run, query.wait)


@router.post("/pools/{pool}/purge", response_model=RemovedView, responses={**ACCEPTED, **changing(404, 409)})
async def purge(app: App, request: Request, pool: Pool, body: PurgeBody, query: Wait) -> RemovedView | Response:
    """Remove blocks by key, age or number. A block in a transfer is gone at once; its slot is freed when the transfer
    ends."""
    make = partial(
        pool.facade.admin.purge,
        everything=bool(body.everything),
        keys=body.keys,
        key_prefixes=body.key_prefixes,
        idle_seconds=body.idle_seconds,
        age_seconds=body.age_seconds,
        slots=body.slots,
        num_bytes=body.num_bytes,
        dry_run=body.dry_run,
    )
    request.scope[CHANGED_NOTHING] = body.dry_run
    return await _remove(app, "purge", pool, make, body.dry_run, query.wait)


@router.post("/pools/{pool}/protect", responses=changing(404))
def protect(app: App, pool: Pool, body: ProtectBody) -> ProtectionResult:
    """Keep blocks from eviction. A new protection replaces an old one."""
    return pool.facade.admin.protect(body.keys, body.ttl_seconds)


@router.post("/pools/{pool}/unprotect", responses=changing(404))
def unprotect(app: App, pool: Pool, body: UnprotectBody) -> ProtectionResult:
    """Let blocks be evicted again: some, or all."""
    return pool.facade.admin.unprotect(body.keys)


@router.post("/pools/{pool}/retry", status_code=202, responses=changing(404, body=False))
async def retry(app: App, pool: Pool) -> PinningView:
    """Let ranks whose pinning failed try again."""
    pool.facade.admin.retry_pinning()
    desired = pool.facade.desired()
    return PinningView(paused=desired.paused, pin_attempt=desired.pin_attempt)


# -- blocks --------------------------------------------------------------------------------------------------------


@router.get("/pools/{pool}/blocks", responses=reading(404))
async def list_blocks(app: App, pool: Pool, query: Annotated[BlocksQuery, Query()]) -> BlocksView:
    """Blocks in order of their slots. A page may be short, or empty, and still not be the last one."""
    page = _page(pool.facade, query)
    return BlocksView(items=list(page.blocks), next_page_token=token_of(page.next_slot))


@router.get("/pools/{pool}/blocks/{key}", responses=reading(404))
async def get_block(app: App, pool: Pool, key: BlockKey) -> BlockStatus:
    """One block."""
    block = pool.facade.block(key)
    if block is None:
        raise NotFoundError(f"there is no block with key {format_key(key)}")
    return block


@router.delete("/pools/{pool}/blocks/{key}", status_code=204, responses=changing(404, 409, body=False))
async def remove_block(app: App, pool: Pool, key: BlockKey) -> Response:
    """Remove one block that nothing uses; 409 while a transfer, a lease or a protection holds it."""
    pool.facade.admin.remove_block(key)
    return Response(status_code=204)


@router.post("/lookup", responses=changing(404, 409))
async def lookup(app: App, body: LookupBody, query: Annotated[PoolQuery, Query()]) -> LookupResult:
    """Which of these keys are in the pool. Only reads: no block is held or counted as used."""
    return choose_pool(app.directory, query.pool).facade.admin.lookup(body.keys)


def _in_slots(pool: HostedPool, body: PoolPatch) -> PoolPatch:
    """`body` with its bytes as slots. Raises `ConfigError` if they exceed what the host can provide."""
    if body.capacity_bytes is None:
        return body
    slot_bytes, highest = pool.facade.config.slot_bytes, pool.max_capacity_slots
    if not slot_bytes <= body.capacity_bytes < (highest + 1) * slot_bytes:
        allowed = f"{slot_bytes} (one slot) to {highest * slot_bytes}, the maximum of this host"
        raise ConfigError("capacity_bytes", body.capacity_bytes, allowed)
    return body.model_copy(update={"capacity_slots": body.capacity_bytes // slot_bytes})


async def _remove(
    app: AppState,
    kind: OperationKind,
    pool: HostedPool,
    make_sweep: Callable[[], Sweep],
    dry_run: bool,
    wait: float,
) -> RemovedView | Response:
    operation = app.operations.start(kind, pool.name, make_sweep, dry_run=dry_run)
    if await has_succeeded(operation, wait):
        assert operation.view.result is not None  # it has succeeded
        return operation.view.result
    return accepted(operation)


def _page(facade: PoolFacade, query: BlocksQuery) -> BlockPage:
    size = query.page_size
    found: list[BlockStatus] = []
    slot: int | None = query.position
    num_searched = 0
    for _ in range(_MAX_SLICES):
        if slot is None or len(found) >= size or num_searched >= _MAX_BLOCKS:
            break
        page = facade.blocks(slot, SLICE_SLOTS if query.state or query.namespace else size - len(found))
        found += [
            block
            for block in page.blocks
            if query.state in (None, block.state) and query.namespace in (None, block.namespace)
        ]
        num_searched += len(page.blocks)
        slot = page.next_slot
    if len(found) > size:
        slot = found[size].slot
    return BlockPage(tuple(found[:size]), slot)
