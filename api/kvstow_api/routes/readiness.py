"""Readiness as JSON; the probes say the same in words."""

from __future__ import annotations

from fastapi import APIRouter

from kvstow_api.openapi import reading
from kvstow_api.services import Use
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views.ranks import ReadinessView

router = APIRouter(prefix="/v1", tags=["readiness"], route_class=StrictRoute)


@router.get("/readiness", responses=reading())
async def get_readiness(use: Use) -> ReadinessView:
    """The state of the whole, and of each rank."""
    return ReadinessView.of(use.engine.readiness())
