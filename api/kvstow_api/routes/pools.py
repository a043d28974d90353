"""The routes about pools and their blocks, and the long-running operations that change them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

from fastapi import Depends, Header, HTTPException, Path, Query, Request, Response
from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from kvstow.control.administration import Sweep
from kvstow.control.engine import PoolFacade
from kvstow.control.pool import SLICE_SLOTS
from kvstow.errors import ConfigError, ConflictError, NotFoundError
from kvstow.keys import format_key
from kvstow.status import BlockPage, BlockStatus, LookupResult
from kvstow_api.answers import (
    POOL_NAME,
    BlockState,
    BlocksView,
    DeletedPoolView,
    OperationKind,
    OperationState,
    OperationsView,
    OperationView,
    PinningView,
    PlanView,
    PoolCurveView,
    PoolsView,
    PoolView,
    RemovedView,
)
from kvstow_api.appstate import App, AppState
from kvstow_api.bodies import EvictBody, Key, LookupBody, PoolPatch, PurgeBody, RecordBody
from kvstow_api.directory import HostedPool
from kvstow_api.middleware import CHANGED_NOTHING
from kvstow_api.openapi import ETAG, Responses, changing, reading
from kvstow_api.operations import Operation
from kvstow_api.queries import ChosenPool, Page, PageOfList, StrictRouter, Wait, find_pool, token_of
from kvstow_api.readings import curve_view, pool_view, pool_views, settings_etag
from kvstow_api.streams import RecordedTrace

# -- operations -------------------------------------------------------------------------------------------------------


operations_router = StrictRouter(prefix="/v1/operations", tags=["operations"])

OperationId = Annotated[str, Path(description="As in the list, or in a `Location`")]

ACCEPTED: Responses = {
    202: {
        "model": OperationView,
        "description": "The work continues as an operation",
        "headers": {
            "Location": {"description": "The operation", "schema": {"type": "string"}},
            "Retry-After": {"description": "Seconds to wait before asking for it", "schema": {"type": "string"}},
        },
    }
}

_CANCEL_SECONDS = 0.1  # how long a cancellation waits so that its answer shows the end, which takes one slice
_OPERATION = TypeAdapter(OperationView)


@operations_router.get("", responses=reading())
async def list_operations(
    app: App,
    page: Page,
    pool: Annotated[str | None, Query(description="Only operations of this pool")] = None,
    kind: Annotated[OperationKind | None, Query(description="Only operations of this kind")] = None,
    state: Annotated[OperationState | None, Query(description="Only operations in this state")] = None,
) -> OperationsView:
    """List the running operations, and the last ones that have ended, the newest first."""
    found = [
        operation
        for operation in app.operations.all()
        if kind in (None, operation.view.kind)
        and state in (None, operation.view.state)
        and pool in (None, operation.view.pool)
        and (not page.position or operation.number < page.position)
    ]
    shown = found[: page.size]
    return OperationsView(
        items=[operation.view for operation in shown],
        next_page_token=token_of(shown[-1].number if len(found) > len(shown) else None),
    )


@operations_router.get("/{operation_id}", responses=reading(404))
async def get_operation(app: App, operation_id: OperationId, wait: Wait = 0.0) -> OperationView:
    """Show one operation, when it ends or after `wait` seconds."""
    return await app.operations.get(operation_id).wait(wait)


@operations_router.delete("/{operation_id}", status_code=204, responses=changing(404, 409, body=False))
async def forget_operation(app: App, operation_id: OperationId) -> Response:
    """Remove an operation that has ended from the list."""
    app.operations.forget(operation_id)
    return Response(status_code=204)


@operations_router.post("/{operation_id}/cancel", responses=changing(404, body=False))
async def cancel_operation(app: App, request: Request, operation_id: OperationId) -> OperationView:
    """Stop an operation after the current slice. What it has done stays done. An operation that has ended stays as it
    is."""
    operation = app.operations.get(operation_id)
    request.scope[CHANGED_NOTHING] = not operation.running
    operation.cancel()
    return await operation.wait(_CANCEL_SECONDS)


async def has_succeeded(operation: Operation, wait: float) -> bool:
    """Whether the operation succeeded within `wait` seconds. Returns False while it runs. Raises if it failed or was
    cancelled."""
    view = await operation.wait(wait)
    if view.state == "cancelled":
        raise ConflictError(f"operation {view.id} was cancelled")
    if view.state == "failed":
        raise operation.failure or HTTPException(500, f"operation {view.id} failed: {view.error}")
    return view.state == "succeeded"


def accepted(operation: Operation) -> Response:
    """Return the answer 202, which names the operation."""
    view = operation.view
    headers = {"Location": f"/v1/operations/{view.id}", "Retry-After": "1"}
    return Response(_OPERATION.dump_json(view), 202, headers, "application/json")


# -- settings that can change while the engine runs -------------------------------------------------------------------


T = TypeVar("T")
IfMatch = Annotated[str | None, Header(description="An ETag: 412 if the settings have changed since it was given")]

_PLANNED = 1024  # how many blocks are visited each time the engine's lock is held


def _plan(pool: HostedPool, patch: PoolPatch, if_match: str | None) -> PlanView:
    """Return what `make_change` would do. Raises what it would raise. It visits every block above the new capacity,
    slice by slice."""
    _check(pool, patch, if_match)
    desired, policy = pool.facade.desired(), pool.facade.stats().pool.policy
    slot: int | None = patch.capacity_slots
    evicted = 0
    while slot is not None:
        page = pool.facade.blocks(slot, _PLANNED)
        evicted += len(page.blocks)
        slot = page.next_slot
    return PlanView(
        capacity_slots=_new(patch.capacity_slots, desired.capacity_slots),
        policy=_new(patch.policy, policy),
        pinning_paused=_new(patch.pinning_paused, desired.paused),
        evicted_slots=evicted,
        evicted_bytes=evicted * pool.facade.config.slot_bytes,
    )


async def make_change(app: AppState, pool: HostedPool, patch: PoolPatch, if_match: str | None) -> Operation | None:
    """Make the change if `if_match` allows it. A resize returns its operation. Changes are made one at a time, so of
    two with the same ETag the second is refused. It raises before anything has changed."""
    admin = pool.facade.admin
    async with app.settings_lock:
        _check(pool, patch, if_match)
        operation = None
        capacity = patch.capacity_slots
        if capacity is not None:
            operation = app.operations.start("resize", pool.name, lambda: admin.resize(capacity))
        if patch.pinning_paused is not None:
            admin.pause_pinning(patch.pinning_paused)
        if patch.policy is not None:
            admin.set_policy(patch.policy)
        return operation


def _check(pool: HostedPool, patch: PoolPatch, if_match: str | None) -> None:
    """Raise 412 if the settings have changed since the client read them, and an error for an impossible size."""
    etag, highest = settings_etag(pool), pool.max_capacity_slots
    if if_match is not None and not {"*", etag} & set(map(str.strip, if_match.split(","))):
        raise HTTPException(
            412,
            f"If-Match is {if_match[:100]}; the settings have changed since, and their ETag is {etag}: read them again",
        )
    if patch.capacity_slots is not None and not pool.is_resizable:
        raise ConflictError(
            f"the host sets the size of pool {pool.name}: change --memory of the service, or what the engines ask for"
        )
    if patch.capacity_slots is not None and patch.capacity_slots > highest:
        raise ConfigError("capacity_slots", patch.capacity_slots, f"1 to {highest}, the maximum of this host")


def _new(given: T | None, now: T) -> T:
    return now if given is None else given


# -- pools ------------------------------------------------------------------------------------------------------------


router = StrictRouter(prefix="/v1", tags=["pools"])


async def _named_pool(app: App, pool: Annotated[str, Path(description="Its name", examples=[POOL_NAME])]) -> HostedPool:
    return find_pool(app.directory, pool)


Pool = Annotated[HostedPool, Depends(_named_pool)]
BlockKey = Annotated[Key, Path(description="The whole key, as hex", examples=["00003d2c1b0a"])]

_WAIT = 0.1
_MAX_SLICES = 16  # how many slices of slots are searched for one page, which limits the cost of a sparse pool
_MAX_BLOCKS = 4096  # how many blocks are searched for one page of a state or a namespace, in some ms


@router.get("/pools", responses=reading())
async def list_pools(app: App) -> PoolsView:
    """List all pools."""
    return PoolsView(items=pool_views(app.directory, app.sampler))


@router.get("/pools/{pool}", responses={**ETAG, **reading(404)})
async def get_pool(app: App, pool: Pool, response: Response) -> PoolView:
    """Show one pool. The ETag names its settings."""
    view = pool_view(app.directory, app.sampler, pool)
    response.headers["ETag"] = view.etag
    return view


@router.get("/pools/{pool}/curve", responses=reading(404))
async def get_pool_curve(app: App, pool: Pool) -> PoolCurveView:
    """Show what pools of other sizes would have hit lately, and what follows for the size of this one."""
    return curve_view(app.sampler, pool)


_TRACE = "application/x-ndjson"
_TRACE_EXAMPLE = (
    '{"timestamp":1250,"input_length":2048,"output_length":512,"hash_ids":[5,6,7,8,9],"looked_up":[0,4]}\n'
    '{"recording":{"end":"time","requests":1,"blocks":4}}\n'
)
_NO_BODY = RecordBody()


@router.post(
    "/pools/{pool}/trace",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Lines of JSON, until the recording ends",
            "content": {_TRACE: {"schema": {"type": "string"}, "example": _TRACE_EXAMPLE}},
        },
        **changing(404, 409),
    },
)
async def record_trace(pool: Pool, body: RecordBody = _NO_BODY) -> StreamingResponse:
    """Record the requests of the pool from now on. Each request that ends is a line, in the format that `kvstow replay`
    reads. In place of keys it has hashes, which have a meaning only within this recording. The last line says why the
    recording has ended: `time`, `size`, or `slow` if the client did not read fast enough. Empty lines show that the
    server is alive. A pool has one recording at a time. It ends with its connection."""
    return RecordedTrace(pool, body, _TRACE)


@router.patch(
    "/pools/{pool}", response_model=PoolView | PlanView, responses={**ETAG, **ACCEPTED, **changing(404, 409, 412)}
)
async def change_pool(
    app: App,
    request: Request,
    pool: Pool,
    body: PoolPatch,
    response: Response,
    wait: Wait = _WAIT,
    if_match: IfMatch = None,
) -> PoolView | PlanView | Response:
    """Resize the pool, change its policy, or pause pinning."""
    patch = _in_slots(pool, body)
    if body.dry_run:
        request.scope[CHANGED_NOTHING] = True
        return await run_in_threadpool(_plan, pool, patch, if_match)
    operation = await make_change(app, pool, patch, if_match)
    if operation is not None and not await has_succeeded(operation, wait):
        return accepted(operation)
    return await get_pool(app, pool, response)


@router.delete("/pools/{pool}", responses=changing(404, 409, body=False))
def delete_pool(app: App, pool: Pool) -> DeletedPoolView:
    """Delete a pool that no session uses, with all its blocks. Other pools get its memory as soon as no process can
    reach it."""
    purged = app.directory.delete_pool(pool.name)
    return DeletedPoolView(stored_blocks=purged.blocks, notice=purged.notice)


@router.post("/pools/{pool}/evict", response_model=RemovedView, responses={**ACCEPTED, **changing(404, 409)})
async def evict(app: App, request: Request, pool: Pool, body: EvictBody, wait: Wait = _WAIT) -> RemovedView | Response:
    """Remove the coldest blocks, or those that only one context has claimed. Leased blocks stay."""
    make = partial(pool.facade.admin.evict, **body.model_dump())
    request.scope[CHANGED_NOTHING] = body.dry_run
    return await _remove(app, "evict", pool, make, body.dry_run, wait)


@router.post("/pools/{pool}/purge", response_model=RemovedView, responses={**ACCEPTED, **changing(404, 409)})
async def purge(app: App, request: Request, pool: Pool, body: PurgeBody, wait: Wait = _WAIT) -> RemovedView | Response:
    """Remove blocks by key, context, age or number. A block in a transfer is removed at once, and its slot is freed
    when the transfer ends."""
    make = partial(pool.facade.admin.purge, **body.model_dump())
    request.scope[CHANGED_NOTHING] = body.dry_run
    return await _remove(app, "purge", pool, make, body.dry_run, wait)


@router.post("/pools/{pool}/retry", status_code=202, responses=changing(404, body=False))
async def retry(pool: Pool) -> PinningView:
    """Let ranks whose pinning failed try again."""
    pool.facade.admin.retry_pinning()
    desired = pool.facade.desired()
    return PinningView(paused=desired.paused, pin_attempt=desired.pin_attempt)


# -- blocks --------------------------------------------------------------------------------------------------------


@router.get("/pools/{pool}/blocks", responses=reading(404))
async def list_blocks(
    pool: Pool,
    page: Page,
    state: Annotated[BlockState | None, Query(description="Only blocks in this state")] = None,
    namespace: Annotated[str | None, Query(description="Only blocks of this namespace of the pool")] = None,
) -> BlocksView:
    """List blocks in the order of their slots. A page may be short, or empty, and still not be the last one."""
    found = _find_blocks(pool.facade, page, state, namespace)
    return BlocksView(items=list(found.blocks), next_page_token=token_of(found.next_slot))


@router.get("/pools/{pool}/blocks/{key}", responses=reading(404))
async def get_block(pool: Pool, key: BlockKey) -> BlockStatus:
    """Show one block."""
    block = pool.facade.block(key)
    if block is None:
        raise NotFoundError(f"there is no block with key {format_key(key)}")
    return block


@router.delete("/pools/{pool}/blocks/{key}", status_code=204, responses=changing(404, 409, body=False))
async def remove_block(pool: Pool, key: BlockKey) -> Response:
    """Remove one block that nothing uses. The answer is 409 while a transfer or a lease holds it."""
    pool.facade.admin.remove_block(key)
    return Response(status_code=204)


@router.post("/lookup", responses=changing(404, 409))
async def lookup(body: LookupBody, pool: ChosenPool) -> LookupResult:
    """Find out which of these keys are in the pool. This only reads: no block is held, or counted as used."""
    return pool.facade.admin.lookup(body.keys)


def _in_slots(pool: HostedPool, body: PoolPatch) -> PoolPatch:
    """Return `body` with its bytes as slots. Raises `ConfigError` if they exceed what the host can provide."""
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
        assert operation.view.result is not None  # because the operation has succeeded
        return operation.view.result
    return accepted(operation)


def _find_blocks(facade: PoolFacade, page: PageOfList, state: BlockState | None, namespace: str | None) -> BlockPage:
    found: list[BlockStatus] = []
    slot: int | None = page.position
    num_searched = 0
    for _ in range(_MAX_SLICES):
        if slot is None or len(found) >= page.size or num_searched >= _MAX_BLOCKS:
            break
        part = facade.blocks(slot, SLICE_SLOTS if state or namespace else page.size - len(found))
        found += [
            block for block in part.blocks if state in (None, block.state) and namespace in (None, block.namespace)
        ]
        num_searched += len(part.blocks)
        slot = part.next_slot
    if len(found) > page.size:
        slot = found[page.size].slot
    return BlockPage(tuple(found[: page.size]), slot)
