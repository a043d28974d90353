"""Loads and stores in flight."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query

from kvstow_api.openapi import reading
from kvstow_api.schemas.transfers import TransfersQuery
from kvstow_api.services import Use
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views.transfers import PendingView, TransfersView, TransferView

router = APIRouter(prefix="/v1", tags=["transfers"], route_class=StrictRoute)

_SCANNED = 2000  # ops looked at for those of one direction or state: some ms with the engine's lock held


@router.get("/transfers", responses=reading())
async def list_transfers(use: Use, query: Annotated[TransfersQuery, Query()]) -> TransfersView:
    """Those in flight for longest first; of one direction or state, among the oldest 2,000. `pending` counts all."""
    narrowed = query.direction or query.state
    found = use.engine.transfers(_SCANNED if narrowed else query.slowest)
    chosen = (item for item in found if query.direction in (None, item.direction) and query.state in (None, item.state))
    return TransfersView(
        pending=PendingView.of(use.engine.stats().pending),
        items=[TransferView.of(item) for item in islice(chosen, query.slowest)],
    )
