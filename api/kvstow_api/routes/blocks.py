"""Blocks in a pool."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from kvstow.control.engine import OffloadEngine
from kvstow.errors import NotFoundError
from kvstow.keys import parse_key
from kvstow.stats import BlockPage
from kvstow_api.openapi import changing, reading
from kvstow_api.routes.pools import PoolName
from kvstow_api.schemas.paging import PageQuery, token_of
from kvstow_api.services import Use
from kvstow_api.views.blocks import BlocksView, BlockView

router = APIRouter(prefix="/v1/pools/{pool}/blocks", tags=["blocks"])

_MAX_SLICES = 16  # slices of slots looked at for one page: what a sparse pool costs at most


@router.get("", responses=reading(404, 422))
async def list_blocks(use: Use, pool: PoolName, query: Annotated[PageQuery, Query()]) -> BlocksView:
    """Blocks in order of their slots. A page may be short, and still not be the last one."""
    page = _page(use.engine, query.position, query.page_size)
    return BlocksView(
        items=[BlockView.made(block) for block in page.blocks],
        next_page_token=token_of(page.next_slot),
    )


@router.get("/{key}", responses=reading(404, 422))
async def get_block(use: Use, pool: PoolName, key: str) -> BlockView:
    """One block."""
    block = use.engine.block(parse_key(key))
    if block is None:
        raise NotFoundError(f"there is no block with key {key}")
    return BlockView.made(block)


@router.delete("/{key}", status_code=204, responses=changing(404, 409, 422, body=False))
async def remove_block(use: Use, pool: PoolName, key: str) -> Response:
    """Remove one block that nothing uses; 409 while a transfer, a lease or an operator's pin holds it."""
    use.engine.admin.remove(parse_key(key))
    return Response(status_code=204)


def _page(engine: OffloadEngine, start_slot: int, size: int) -> BlockPage:
    found = engine.blocks(start_slot, size)
    for _ in range(_MAX_SLICES - 1):
        if found.next_slot is None or len(found.blocks) == size:
            break
        more = engine.blocks(found.next_slot, size - len(found.blocks))
        found = BlockPage(found.blocks + more.blocks, more.next_slot)
    return found
