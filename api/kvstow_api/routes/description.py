"""The API's description for programs."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from kvstow_api.openapi import Description

router = APIRouter(include_in_schema=False)


@router.get("/openapi.json")
async def get_openapi(request: Request) -> Response:
    """The OpenAPI description of all routes."""
    description: Description = request.app.openapi
    return Response(await run_in_threadpool(description.document), media_type="application/json")
