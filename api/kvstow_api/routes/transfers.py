"""Loads and stores in flight."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query

from kvstow_api.openapi import reading
from kvstow_api.schemas.transfers import PendingView, TransfersQuery, TransfersView, TransferView
from kvstow_api.services import Use

router = APIRouter(prefix="/v1", tags=["transfers"])

_SCANNED = 2000  # ops looked at for those of one direction: some ms with the engine's lock held


@router.get("/transfers", responses=reading(422))
async def list_transfers(use: Use, query: Annotated[TransfersQuery, Query()]) -> TransfersView:
    """The oldest transfers first, or those of one direction among the oldest 2,000; `pending` counts all."""
    found = use.engine.transfers(_SCANNED if query.direction else query.limit)
    chosen = (item for item in found if query.direction in (None, item.direction))
    return TransfersView(
        pending=PendingView.model_validate(use.engine.stats().pending),
        items=[TransferView.model_validate(item) for item in islice(chosen, query.limit)],
    )
