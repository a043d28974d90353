"""Pools: their settings, and what operators do with their blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from kvstow.errors import ConfigError, NotFoundError
from kvstow_api import settings
from kvstow_api.accepted import ACCEPTED, accepted, has_succeeded
from kvstow_api.openapi import ETAG, changing, reading
from kvstow_api.operations import Sweeping
from kvstow_api.requests import CHANGED_NOTHING
from kvstow_api.schemas.operations import WorkQuery
from kvstow_api.schemas.pools import EvictBody, PoolPatch, ProtectBody, PurgeBody, RuntimePatch, UnprotectBody
from kvstow_api.services import Services, Use
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views.operations import OperationKind
from kvstow_api.views.pools import POOL_NAME, PinningView, PlanView, PoolsView, PoolView, ProtectionView, RemovedView

router = APIRouter(prefix="/v1/pools", tags=["pools"], route_class=StrictRoute)


async def existing_pool(pool: Annotated[str, Path(description="Its name", examples=[POOL_NAME])]) -> str:
    """The name of a pool that exists."""
    if pool != POOL_NAME:
        raise NotFoundError(f"there is no pool {pool!r}; there is: {POOL_NAME}")
    return pool


PoolName = Annotated[str, Depends(existing_pool)]
Wait = Annotated[WorkQuery, Query()]


@router.get("", responses=reading())
async def list_pools(use: Use) -> PoolsView:
    """All pools."""
    return PoolsView(items=[_view(use)])


@router.get("/{pool}", responses={**ETAG, **reading(404)})
async def get_pool(use: Use, pool: PoolName, response: Response) -> PoolView:
    """One pool. The ETag names its settings."""
    view = _view(use)
    response.headers["ETag"] = view.etag
    return view


@router.patch("/{pool}", response_model=PoolView | PlanView, responses={**ETAG, **ACCEPTED, **changing(404, 409, 412)})
async def change_pool(
    use: Use,
    request: Request,
    pool: PoolName,
    body: PoolPatch,
    query: Wait,
    response: Response,
    if_match: settings.IfMatch = None,
) -> PoolView | PlanView | Response:
    """Resize the pool, change its policy, or pause pinning."""
    patch = _in_slots(use, body)
    if body.dry_run:
        request.scope[CHANGED_NOTHING] = True
        return await settings.plan(use, patch, if_match)
    operation = await settings.apply(use, patch, if_match)
    if operation is not None and not await has_succeeded(operation, query.wait):
        return accepted(operation)
    return await get_pool(use, pool, response)


@router.post("/{pool}/evict", response_model=RemovedView, responses={**ACCEPTED, **changing(404)})
async def evict(use: Use, request: Request, pool: PoolName, body: EvictBody, query: Wait) -> RemovedView | Response:
    """Remove the coldest blocks. Blocks that are leased or protected stay."""
    make = partial(
        use.engine.admin.evict,
        slots=body.slots,
        num_bytes=body.num_bytes,
        idle_seconds=body.idle_seconds,
        dry_run=body.dry_run,
    )
    request.scope[CHANGED_NOTHING] = body.dry_run
    return await _remove(use, "evict", make, body.dry_run, query.wait)


@router.post("/{pool}/purge", response_model=RemovedView, responses={**ACCEPTED, **changing(404)})
async def purge(use: Use, request: Request, pool: PoolName, body: PurgeBody, query: Wait) -> RemovedView | Response:
    """Remove blocks by name or by age. What a transfer holds leaves at once, its slot when the transfer ends."""
    make = partial(
        use.engine.admin.purge,
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
    return await _remove(use, "purge", make, body.dry_run, query.wait)


@router.post("/{pool}/protect", responses=changing(404))
def protect(use: Use, pool: PoolName, body: ProtectBody) -> ProtectionView:
    """Protect blocks from eviction. Replaces any earlier protection."""
    return ProtectionView.of(use.engine.admin.protect(body.keys, body.ttl_seconds))


@router.post("/{pool}/unprotect", responses=changing(404))
def unprotect(use: Use, pool: PoolName, body: UnprotectBody) -> ProtectionView:
    """Let some blocks, or all, be evicted again."""
    return ProtectionView.of(use.engine.admin.unprotect(body.keys))


@router.post("/{pool}/retry", status_code=202, responses=changing(404, body=False))
async def retry(use: Use, pool: PoolName) -> PinningView:
    """Ranks whose pinning failed try again."""
    use.engine.admin.retry_pinning()
    return PinningView.of(use.engine.desired())


def _view(use: Services) -> PoolView:
    etag = settings.etag(use)
    return PoolView.made(
        use.engine.stats(),
        etag=etag,
        pinning_paused=use.engine.desired().paused,
        max_capacity_slots=use.context.max_capacity_slots,
        num_ranks=use.engine.config.num_ranks,
    )


def _in_slots(use: Services, body: PoolPatch) -> RuntimePatch:
    """`body` with its bytes as slots. Raises `ConfigError` if the host cannot have them."""
    if body.capacity_bytes is None:
        return body
    slot_bytes, highest = use.engine.config.slot_bytes, use.context.max_capacity_slots
    if not slot_bytes <= body.capacity_bytes < (highest + 1) * slot_bytes:
        allowed = f"{slot_bytes} (one slot) to {highest * slot_bytes}, the maximum of this host"
        raise ConfigError("capacity_bytes", body.capacity_bytes, allowed)
    return body.model_copy(update={"capacity_slots": body.capacity_bytes // slot_bytes})


async def _remove(
    use: Services, kind: OperationKind, make_sweep: Callable[[], Sweeping], dry_run: bool, wait: float
) -> RemovedView | Response:
    operation = use.operations.start(kind, make_sweep, dry_run=dry_run)
    if await has_succeeded(operation, wait):
        return RemovedView.of(operation.view.result)
    return accepted(operation)
