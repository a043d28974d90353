"""Blocks in a pool."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from fastapi import APIRouter, Query

from kvstow.control.engine import OffloadEngine
from kvstow.errors import InvalidRequestError, NotFoundError
from kvstow.keys import parse_key
from kvstow.stats import BlockPage
from kvstow_api.openapi import reading
from kvstow_api.routes.pools import PoolName
from kvstow_api.schemas.blocks import BlocksQuery, BlocksView, BlockView
from kvstow_api.services import Use

router = APIRouter(prefix="/v1/pools/{pool}/blocks", tags=["blocks"])

_MAX_SLICES = 16  # slices of slots looked at for one page: what a sparse pool costs at most


@router.get("", responses=reading(404, 422))
async def list_blocks(use: Use, pool: PoolName, query: Annotated[BlocksQuery, Query()]) -> BlocksView:
    """Blocks in order of their slots. A page may be short, and still not be the last one."""
    page = _page(use.engine, _slot_of(query.page_token), query.page_size)
    return BlocksView(
        items=[BlockView.of(block) for block in page.blocks],
        next_page_token=None if page.next_slot is None else _token_of(page.next_slot),
    )


@router.get("/{key}", responses=reading(404, 422))
async def get_block(use: Use, pool: PoolName, key: str) -> BlockView:
    """One block."""
    block = use.engine.block(parse_key(key))
    if block is None:
        raise NotFoundError(f"there is no block with key {key}")
    return BlockView.of(block)


def _page(engine: OffloadEngine, start_slot: int, size: int) -> BlockPage:
    found = engine.blocks(start_slot, size)
    for _ in range(_MAX_SLICES - 1):
        if found.next_slot is None or len(found.blocks) == size:
            break
        more = engine.blocks(found.next_slot, size - len(found.blocks))
        found = BlockPage(found.blocks + more.blocks, more.next_slot)
    return found


def _token_of(slot: int) -> str:
    return base64.urlsafe_b64encode(slot.to_bytes(6, "big")).decode()


def _slot_of(token: str) -> int:
    """Inverse of `_token_of`; 0 for no token."""
    try:
        raw = base64.b64decode(token, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b"?"
    if token and len(raw) != 6:
        raise InvalidRequestError(f"page_token is {token[:40]!r}; allowed: the next_page_token of an earlier answer")
    return int.from_bytes(raw, "big")
