"""The fleet tier: the store that several nodes share."""

from __future__ import annotations

from kvstow_api.answers import TierView
from kvstow_api.appstate import App
from kvstow_api.openapi import reading
from kvstow_api.queries import StrictRouter
from kvstow_api.readings import tier_view

router = StrictRouter(prefix="/v1/tier", tags=["tier"])


@router.get("", responses=reading())
async def get_tier(app: App) -> TierView:
    """The store, and for each pool what goes to it and comes from it, and why. Without a store, `items` is empty."""
    return tier_view(app.directory)
