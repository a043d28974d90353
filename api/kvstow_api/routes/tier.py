"""The fleet tier: the store that several nodes share, and what operators do with it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from kvstow.errors import ConflictError
from kvstow_api.appstate import App, AppState
from kvstow_api.bodies import TierAttachBody, TierBypassBody, TierPurgeBody, TierWeightsBody
from kvstow_api.openapi import changing, reading
from kvstow_api.poolchoice import choose_pool, find_pool
from kvstow_api.queries import PoolQuery, SwitchQuery, WorkQuery
from kvstow_api.routes.operations import ACCEPTED, accepted, has_succeeded
from kvstow_api.strictroute import StrictRoute
from kvstow_api.tiercontrol import TierControl
from kvstow_api.tierview import bypass_view, tier_view
from kvstow_api.views.tier import TierBypassView, TierPurgedView, TierView

router = APIRouter(prefix="/v1/tier", tags=["tier"], route_class=StrictRoute)


@router.get("", responses=reading())
async def get_tier(app: App) -> TierView:
    """The store, and for each pool what goes to it and comes from it, and why. Without a store, `items` is empty."""
    return tier_view(app.directory)


@router.post("/attach", responses=changing(409))
def attach_tier(app: App, body: TierAttachBody) -> TierView:
    """Use a store, which need not be there yet. 409 if one is attached, or none can be."""
    _control(app).attach(body.url, body.write)
    return tier_view(app.directory)


@router.post("/detach", responses=changing(409, body=False))
def detach_tier(app: App) -> TierView:
    """Stop using the store. The answer comes when nothing touches the pools' memory for it, so calls to the store that
    are under way end first. What the store has stays there."""
    _control(app).detach()
    return tier_view(app.directory)


@router.put("/bypass", responses=changing(404, 409))
async def bypass_tier(app: App, query: Annotated[SwitchQuery, Query()], body: TierBypassBody) -> TierBypassView:
    """Leave the store alone, or use it again. What is under way ends as usual; what is stored meanwhile is not put. The
    answer is that of the whole host."""
    control = _control(app)
    pool = None if query.pool is None else find_pool(app.directory, query.pool).name
    ttl = body.ttl_seconds if body.bypassed else None  # nothing is off, so nothing returns
    return bypass_view(control.set_bypass(bypassed=body.bypassed, ttl_seconds=ttl, pool=pool))


@router.post("/purge", response_model=TierPurgedView, responses={**ACCEPTED, **changing(409)})
async def purge_tier(app: App, body: TierPurgeBody, query: Annotated[WorkQuery, Query()]) -> TierPurgedView | Response:
    """Remove all objects of one fingerprint from the store, for all nodes that use it. Can be cancelled until the store
    has begun. Nodes that have these weights put them again."""
    make = partial(_control(app).purge, body.fingerprint)
    operation = app.operations.start("tier-purge", "", make)
    if await has_succeeded(operation, query.wait):
        return TierPurgedView(fingerprint=body.fingerprint, objects=operation.view.progress.done)
    return accepted(operation)


@router.post("/weights", responses=changing(404, 409))
async def name_tier_weights(app: App, query: Annotated[PoolQuery, Query()], body: TierWeightsBody) -> TierView:
    """Name the weights that an engine has now, after it has reset its prefix cache: from its next step on it shares
    blocks with all that name theirs the same. 409 while they have a name."""
    control = _control(app)
    control.name_weights(choose_pool(app.directory, query.pool).name, body.namespace, body.weights_id)
    return tier_view(app.directory)


def _control(app: AppState) -> TierControl:
    if app.directory.tier is None:
        raise ConflictError("this host cannot have a fleet tier")
    return app.directory.tier
