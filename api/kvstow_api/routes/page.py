"""The status page, for people."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import HTMLResponse, StreamingResponse

from kvstow_api.page.live import StatusPage
from kvstow_api.streamlimit import LimitedStream

router = APIRouter(include_in_schema=False)


async def _page_of(request: Request) -> StatusPage:
    page: StatusPage = request.app.state.page
    return page


Page = Annotated[StatusPage, Depends(_page_of)]


@router.get("/")
async def get_page(page: Page) -> HTMLResponse:
    """The service at a glance."""
    return HTMLResponse(await page.document(), headers=dict(await page.headers()))


@router.get("/page/live")
async def get_live(page: Page) -> StreamingResponse:
    """Each part of the page whenever it has changed, as server-sent events."""
    return LimitedStream(page.open(), page.limit)
