"""Drain: let what is in flight end, and take nothing new."""

from __future__ import annotations

from fastapi import APIRouter

from kvstow_api.openapi import changing, reading
from kvstow_api.schemas.gate import DrainBody
from kvstow_api.services import Use
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views.gate import DrainView

router = APIRouter(prefix="/v1", tags=["drain"], route_class=StrictRoute)

_ALL = DrainBody(deadline_seconds=None)


@router.get("/drain", responses=reading())
async def get_drain(use: Use) -> DrainView:
    """Whether a drain is on, and what is still in flight."""
    return DrainView.of(use.engine.admin.drain_status)


@router.put("/drain", responses=changing())
async def start_drain(use: Use, body: DrainBody = _ALL) -> DrainView:
    """Start a drain, or change the one that is on. `/readyz` fails from now on."""
    return DrainView.of(use.engine.admin.drain(body.mode, body.deadline_seconds))


@router.delete("/drain", responses=changing(body=False))
async def end_drain(use: Use) -> DrainView:
    """Take traffic again."""
    return DrainView.of(use.engine.admin.undrain())
