"""The server itself: its status page, description, settings, log levels, events, curves and diagnosis."""

from __future__ import annotations

from inspect import getdoc
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, Response, StreamingResponse

from kvstow_api import loglevels
from kvstow_api.answers import BLOCK_EVENTS, DoctorView, EventView, InfoView, LogLevelsView, LogLevelView
from kvstow_api.appstate import App
from kvstow_api.bodies import LogLevelBody
from kvstow_api.figures import CurvesView
from kvstow_api.openapi import Description, changing, reading
from kvstow_api.page.live import StatusPage
from kvstow_api.poolchoice import choose_pool, pool_if_any
from kvstow_api.queries import EventsQuery, PoolQuery, StrictRouter
from kvstow_api.streamlimit import LimitedStream

router = StrictRouter(tags=["server"])


# -- for people and for generators of clients ----------------------------------------------------------------------


async def _page_of(request: Request) -> StatusPage:
    page: StatusPage = request.app.state.page
    return page


Page = Annotated[StatusPage, Depends(_page_of)]


async def get_page(page: Page, pool: str | None = None) -> HTMLResponse:
    """The status page, of one pool or of all."""
    return HTMLResponse(await page.document(pool), headers=dict(await page.headers()))


async def get_live(page: Page, pool: str | None = None) -> StreamingResponse:
    """Each section of the status page whenever it changes, as server-sent events."""
    return LimitedStream(page.open(pool), page.limit)


async def get_openapi(request: Request) -> Response:
    """The OpenAPI description of all routes."""
    description: Description = request.app.openapi
    return Response(await run_in_threadpool(description.document), media_type="application/json")


_lenient = APIRouter(include_in_schema=False)
for _path, _endpoint in (("/", get_page), ("/page/live", get_live), ("/openapi.json", get_openapi)):
    _lenient.add_api_route(_path, _endpoint, methods=["GET"])
router.routes.extend(_lenient.routes)


# -- settings and levels of the log --------------------------------------------------------------------------------


@router.get("/v1/info", responses=reading())
async def get_info(app: App) -> InfoView:
    """Version, mode and settings, without secrets."""
    host = app.host
    return InfoView(
        version=host.version,
        mode=host.mode,
        node=app.directory.is_node,
        host_name=host.host_name,
        attach=host.attach,
        addresses=list(host.addresses),
        engine_id=app.directory.engine_id,
        started=app.started,
        uptime_seconds=app.uptime,
        token_required=host.token_file is not None or host.client_certificates,
        num_ranks=sum(len(pool.facade.readiness().ranks) for pool in app.directory.pools()),
        pools=[pool.name for pool in app.directory.pools()],
        build=dict(host.build),
        settings=dict(host.settings),
    )


@router.get("/v1/loglevel", responses=reading())
async def get_log_levels() -> LogLevelsView:
    """Every logger of KVStow and its level."""
    return LogLevelsView(items=[loglevels.view(name) for name in loglevels.names()])


@router.put("/v1/loglevel", responses=changing())
async def set_log_level(body: LogLevelBody) -> LogLevelView:
    """Set the level of one logger."""
    return loglevels.change(body.logger, body.level)


# -- what happens, has happened and is wrong -----------------------------------------------------------------------

LastEventId = Annotated[str | None, Header(description="Continue after the event with this id")]

_MEDIA_TYPE = "text/event-stream"
_STREAM = {
    "type": "string",
    "contentMediaType": _MEDIA_TYPE,
    "contentSchema": {"type": "array", "items": {"$ref": "#/components/schemas/EventView"}},
}
_EXAMPLE = 'id: 6f1d2a9c-12-0\nevent: state\ndata: {"time": "2026-11-02T09:30:00.000Z", "state": "ready"}\n\n'


@router.get(
    "/v1/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-sent events; the stream does not end",
            "content": {_MEDIA_TYPE: {"schema": _STREAM, "example": _EXAMPLE}},
        },
        **reading(404, 409),
    },
    description=f"""Events from now on, as server-sent events with `id`, `event` (the type) and `data`.

{getdoc(EventView)}""",
)
async def get_events(
    app: App, query: Annotated[EventsQuery, Query()], last_event_id: LastEventId = None
) -> StreamingResponse:
    """Events from now on, or after the last one that the client has read."""
    pool = None
    if query.pool is not None or not app.directory.is_node or not query.wanted.isdisjoint(BLOCK_EVENTS):
        pool = choose_pool(app.directory, query.pool)
    stream = app.streams.open(query.wanted, pool, after=last_event_id, recent=query.recent)
    return LimitedStream(stream, app.streams.limit)


@router.get("/v1/curves", responses=reading(404))
async def get_curves(app: App, query: Annotated[PoolQuery, Query()]) -> CurvesView:
    """What the status page draws of a pool: the last 5 minutes, every 5 s."""
    pool = pool_if_any(app.directory, query.pool)
    return app.sampler.curves_of(None if pool is None else pool.name)


@router.get("/v1/doctor", responses=reading())
async def get_doctor(app: App) -> DoctorView:
    """What is wrong, the worst first: each condition with what mends it and the numbers behind it. Measures everything
    anew; `/v1/readiness` has the same conditions from the last measurements."""
    await app.watch.look()
    return app.conditions.find()
