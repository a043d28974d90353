"""Events as they happen, and the counters of the last hour."""

from __future__ import annotations

from inspect import getdoc
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import StreamingResponse

from kvstow_api.openapi import reading
from kvstow_api.schemas.events import EventsQuery
from kvstow_api.services import Use
from kvstow_api.streamlimit import LimitedStream
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views.events import EventView
from kvstow_api.views.history import HistoryView

router = APIRouter(prefix="/v1", tags=["events"], route_class=StrictRoute)

LastEventId = Annotated[str | None, Header(description="Go on after the event with this id")]

_MEDIA_TYPE = "text/event-stream"
_EXAMPLE = 'id: 6f1d2a9c-12-0\nevent: state\ndata: {"time": "2026-11-02T09:30:00.000Z", "state": "ready"}\n\n'


_DESCRIPTION = f"""What happens from now on, as server-sent events with `id`, `event` (the type) and `data`.

{getdoc(EventView)}"""


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-sent events; the stream does not end",
            "content": {_MEDIA_TYPE: {"schema": {"type": "string"}, "example": _EXAMPLE}},
        },
        **reading(),
    },
    description=_DESCRIPTION,
)
async def get_events(
    use: Use, query: Annotated[EventsQuery, Query()], last_event_id: LastEventId = None
) -> StreamingResponse:
    """What happens from now on, or after the event that was read last."""
    stream = use.streams.open(query.wanted, after=last_event_id, recent=query.recent)
    return LimitedStream(stream, use.streams.limit)


@router.get("/history", responses=reading())
async def get_history(use: Use) -> HistoryView:
    """Counters of the last hour, every 5 s."""
    return use.watch.history
