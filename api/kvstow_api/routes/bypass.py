"""Bypass: switch loads or stores off, and leave the pool as it is."""

from __future__ import annotations

from fastapi import APIRouter

from kvstow_api.openapi import changing, reading
from kvstow_api.schemas.gate import BypassBody
from kvstow_api.services import Use
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views.gate import BypassView

router = APIRouter(prefix="/v1", tags=["bypass"], route_class=StrictRoute)


@router.get("/bypass", responses=reading())
async def get_bypass(use: Use) -> BypassView:
    """What is switched off."""
    return BypassView.of(use.engine.admin.bypass)


@router.put("/bypass", responses=changing())
async def set_bypass(use: Use, body: BypassBody) -> BypassView:
    """Replace the bypass: a direction that is left out is on."""
    load, store = bool(body.load), bool(body.store)
    ttl = body.ttl_seconds if load or store else None  # where nothing is off, nothing comes back
    return BypassView.of(use.engine.admin.set_bypass(load=load, store=store, ttl_seconds=ttl))
