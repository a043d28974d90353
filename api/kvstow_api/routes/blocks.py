"""Blocks in a pool."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from kvstow.control.engine import OffloadEngine
from kvstow.control.sweeps import SLICE_SLOTS
from kvstow.errors import NotFoundError
from kvstow.keys import format_key
from kvstow.stats import BlockPage
from kvstow.stats import BlockView as Block
from kvstow_api.openapi import changing, reading
from kvstow_api.routes.pools import PoolName
from kvstow_api.schemas.base import Key
from kvstow_api.schemas.blocks import BlocksQuery
from kvstow_api.schemas.paging import token_of
from kvstow_api.services import Use
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views.blocks import BlocksView, BlockView

router = APIRouter(prefix="/v1/pools/{pool}/blocks", tags=["blocks"], route_class=StrictRoute)

BlockKey = Annotated[Key, Path(description="All of it, as hex", examples=["00003d2c1b0a"])]

_MAX_SLICES = 16  # slices of slots looked at for one page: what a sparse pool costs at most
_MAX_BLOCKS = 4096  # looked at for one page of a state: some ms


@router.get("", responses=reading(404))
async def list_blocks(use: Use, pool: PoolName, query: Annotated[BlocksQuery, Query()]) -> BlocksView:
    """Blocks in order of their slots. A page may be short, or empty, and still not be the last one."""
    page = _page(use.engine, query)
    return BlocksView(
        items=[BlockView.made(block) for block in page.blocks],
        next_page_token=token_of(page.next_slot),
    )


@router.get("/{key}", responses=reading(404))
async def get_block(use: Use, pool: PoolName, key: BlockKey) -> BlockView:
    """One block."""
    block = use.engine.block(key)
    if block is None:
        raise NotFoundError(f"there is no block with key {format_key(key)}")
    return BlockView.made(block)


@router.delete("/{key}", status_code=204, responses=changing(404, 409, body=False))
async def remove_block(use: Use, pool: PoolName, key: BlockKey) -> Response:
    """Remove one block that nothing uses; 409 while it is leased, protected or being loaded."""
    use.engine.admin.remove(key)
    return Response(status_code=204)


def _page(engine: OffloadEngine, query: BlocksQuery) -> BlockPage:
    size = query.page_size
    found: list[Block] = []
    slot: int | None = query.position
    looked_at = 0
    for _ in range(_MAX_SLICES):
        if slot is None or len(found) >= size or looked_at >= _MAX_BLOCKS:
            break
        page = engine.blocks(slot, SLICE_SLOTS if query.state else size - len(found))
        found += [block for block in page.blocks if query.state in (None, block.state)]
        looked_at += len(page.blocks)
        slot = page.next_slot
    if len(found) > size:
        slot = found[size].slot
    return BlockPage(tuple(found[:size]), slot)
