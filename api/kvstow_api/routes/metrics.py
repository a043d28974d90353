"""Metrics for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from kvstow_api.metrics.exposition import MEDIA_TYPE, render
from kvstow_api.openapi import Responses, reading
from kvstow_api.services import Use

router = APIRouter(tags=["metrics"])


_TOLD: Responses = {200: {"content": {"text/plain": {"example": "kvstow_ready 1.0\n"}}}}


@router.get("/metrics", response_class=Response, responses={**_TOLD, **reading(guarded=False)})
async def metrics(use: Use) -> Response:
    """All metrics in Prometheus' text format, whatever the scraper would prefer."""
    return Response(render(use.context.registry), media_type=MEDIA_TYPE)
