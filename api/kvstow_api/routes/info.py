"""What this server is."""

from __future__ import annotations

from fastapi import APIRouter

from kvstow_api.openapi import reading
from kvstow_api.services import Use
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views.info import InfoView
from kvstow_api.views.pools import POOL_NAME

router = APIRouter(prefix="/v1", tags=["info"], route_class=StrictRoute)


@router.get("/info", responses=reading())
async def get_info(use: Use) -> InfoView:
    """Version, mode and settings, without secrets."""
    context = use.context
    return InfoView(
        version=context.version,
        mode=context.mode,
        addresses=list(context.addresses),
        engine_id=context.engine.engine_id,
        started=use.started,
        uptime_seconds=use.uptime,
        token_required=context.token_file is not None or context.client_certificates,
        num_ranks=context.engine.config.num_ranks,
        pools=[POOL_NAME],
        build=dict(context.build),
        settings=dict(context.settings),
    )
