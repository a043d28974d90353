"""Settings, and the levels of the log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from kvstow_api import settings
from kvstow_api.accepted import ACCEPTED, accepted, has_succeeded
from kvstow_api.openapi import ETAG, changing, reading
from kvstow_api.requests import CHANGED_NOTHING
from kvstow_api.schemas.config import ConfigPatch, ConfigQuery, LogLevelBody
from kvstow_api.services import Use
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views.config import ConfigView, LogLevelsView, LogLevelView
from kvstow_api.views.pools import PlanView

router = APIRouter(prefix="/v1", tags=["config"], route_class=StrictRoute)


@router.get("/config", responses={**ETAG, **reading()})
async def get_config(use: Use, response: Response) -> ConfigView:
    """What can be changed now, and what the service was started with. The ETag names the former."""
    etag = settings.etag(use)
    response.headers["ETag"] = etag
    return ConfigView(etag=etag, runtime=settings.current(use), startup=dict(use.context.settings))


@router.patch("/config", response_model=ConfigView | PlanView, responses={**ETAG, **ACCEPTED, **changing(409, 412)})
async def change_config(
    use: Use,
    request: Request,
    body: ConfigPatch,
    query: Annotated[ConfigQuery, Query()],
    response: Response,
    if_match: settings.IfMatch = None,
) -> ConfigView | PlanView | Response:
    """Change settings by a merge patch; 409 for one that needs a restart."""
    settings.check_startup(use, body.startup)
    if query.dry_run:
        request.scope[CHANGED_NOTHING] = True
        return await settings.plan(use, body.runtime, if_match)
    operation = await settings.apply(use, body.runtime, if_match)
    if operation is not None and not await has_succeeded(operation, query.wait):
        return accepted(operation)
    return await get_config(use, response)


@router.get("/loglevel", responses=reading())
async def get_log_levels(use: Use) -> LogLevelsView:
    """Every logger of KVStow and its level."""
    return LogLevelsView(items=[use.log_levels.view(name) for name in use.log_levels.names()])


@router.put("/loglevel", responses=changing())
async def set_log_level(use: Use, body: LogLevelBody) -> LogLevelView:
    """Set the level of one logger, for a time or until it is set again."""
    return use.log_levels.set(body.logger, body.level, body.ttl_seconds)
