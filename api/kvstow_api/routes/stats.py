"""Counters of the engine as JSON."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from kvstow_api.openapi import reading
from kvstow_api.schemas.stats import StatsQuery
from kvstow_api.services import Use
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views.stats import StatsView

router = APIRouter(prefix="/v1", tags=["stats"], route_class=StrictRoute)


@router.get("/stats", responses=reading())
async def get_stats(use: Use, query: Annotated[StatsQuery, Query()]) -> StatsView:
    """One consistent snapshot of the counters."""
    return StatsView.made(use.engine.stats(), query.sections)
