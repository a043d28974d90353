"""Metrics for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

from kvstow_api.openapi import reading
from kvstow_api.services import Use

router = APIRouter(tags=["metrics"])


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, **reading()})
async def metrics(request: Request, use: Use) -> Response:
    """All metrics, as Prometheus text or OpenMetrics."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(use.context.registry), media_type=media_type)
