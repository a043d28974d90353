"""Is it there?"""

from __future__ import annotations

from fastapi import APIRouter

from kvstow_api.openapi import changing
from kvstow_api.schemas.blocks import LookupBody
from kvstow_api.services import Use
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views.blocks import LookupView

router = APIRouter(prefix="/v1", tags=["blocks"], route_class=StrictRoute)


@router.post("/lookup", responses=changing())
async def lookup(use: Use, body: LookupBody) -> LookupView:
    """Which of these keys are in the pool. It only reads: nothing is held, nothing counts as used."""
    found = use.engine.admin.lookup(body.keys)
    return LookupView.of(found)
