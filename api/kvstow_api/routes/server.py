"""The routes about the server itself: the probes and /metrics, which machines poll, its status page, description, log
levels, events, curves and diagnosis."""

from __future__ import annotations

import logging
from inspect import getdoc
from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from prometheus_client import generate_latest
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, Response, StreamingResponse

from kvstow.errors import ConfigError
from kvstow_api.answers import (
    BLOCK_EVENTS,
    EVENT_TYPES,
    DoctorView,
    EventView,
    InfoView,
    LogLevelsView,
    LogLevelView,
    OverviewView,
)
from kvstow_api.appstate import App, info_view
from kvstow_api.auth import is_stranger
from kvstow_api.bodies import LogLevelBody
from kvstow_api.health import Probe, Verdict
from kvstow_api.openapi import Description, Responses, changing, reading
from kvstow_api.overview import Overviews
from kvstow_api.page.status import status_page
from kvstow_api.queries import AnyPool, StrictRouter, choose_pool
from kvstow_api.streams import LimitedStream

# -- routes that machines poll ----------------------------------------------------------------------------------------


probes_router = APIRouter(tags=["probes"], default_response_class=PlainTextResponse)

_PROBE_OF = {
    "/livez": "livez",
    "/readyz": "readyz",
    "/health": "readyz",
    "/healthz": "readyz",
    "/startupz": "startupz",
}
_PROBE_RESPONSES: Responses = {
    200: {"description": "No required check fails", "content": {"text/plain": {"example": "ok"}}},
    503: {
        "description": "A required check fails",
        "content": {"text/plain": {"example": "[-]loop failed: the event loop was late\nreadyz check failed\n"}},
    },
}
_METRICS_RESPONSES: Responses = {200: {"content": {"text/plain": {"example": "kvstow_ready 1.0\n"}}}}

Verbose = Annotated[str | None, Query(description="One line per check; on unless `false` or `0`")]
CheckName = Annotated[str, Path(description="One of those that `?verbose` lists")]
Exclude = Annotated[str, Query(description="Checks to leave out, separated by commas")]

_ROOT = "kvstow"
_MEDIA_TYPE = "text/event-stream"
_STREAM = {
    "type": "string",
    "contentMediaType": _MEDIA_TYPE,
    "contentSchema": {"type": "array", "items": {"$ref": "#/components/schemas/EventView"}},
}
_EXAMPLE = 'id: 6f1d2a9c-12-0\nevent: state\ndata: {"time": "2026-11-02T09:30:00.000Z", "state": "ready"}\n\n'
_MAX_AGE_FOR_STRANGERS = 1.0
"""For clients without a credential, the measurements may be this old, in seconds. Measuring reads the files of all
processes, and such clients must not keep it going."""


async def probe(request: Request, app: App, verbose: Verbose = None, exclude: Exclude = "") -> PlainTextResponse:
    """Answer `ok`, or one line per check."""
    chosen = app.probes[_PROBE_OF[request.scope["route"].path]]
    return _answer(chosen.run(_known(chosen, exclude)), verbose)


async def check(request: Request, app: App, check: CheckName, verbose: Verbose = None) -> PlainTextResponse:
    """Run one check of a probe. Here an informational check fails the probe, too."""
    chosen = app.probes[_PROBE_OF[request.scope["route"].path.removesuffix("/{check}")]]
    if check not in chosen.checks:
        raise HTTPException(404, f"{chosen.name} has no check {check!r}; it has: {', '.join(chosen.checks)}")
    return _answer(chosen.run_one(check), verbose)


for _path in _PROBE_OF:
    for _route, _endpoint, _codes in ((_path, probe, (422,)), (f"{_path}/{{check}}", check, (404,))):
        _shared: dict[str, Any] = {"responses": {**_PROBE_RESPONSES, **reading(*_codes, guarded=False)}}
        probes_router.add_api_route(_route, _endpoint, methods=["GET"], **_shared)


@probes_router.get("/metrics", response_class=Response, responses={**_METRICS_RESPONSES, **reading(guarded=False)})
async def metrics(app: App) -> Response:
    """Show all metrics in Prometheus' text format, regardless of the Accept header."""
    return Response(generate_latest(app.host.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


def _known(chosen: Probe, exclude: str) -> frozenset[str]:
    """Return the names in `exclude`. Raises a validation error for a name that is not a check of the probe."""
    names = frozenset(filter(None, (name.strip() for name in exclude.split(","))))
    unknown = sorted(names - set(chosen.checks))
    if unknown:
        allowed = ", ".join(chosen.checks)
        message = f"{chosen.name} has no check {', '.join(unknown)}; it has: {allowed}"
        error = {"type": "enum", "loc": ("query", "exclude"), "msg": message, "input": exclude}
        raise RequestValidationError([{**error, "ctx": {"allowed": allowed}}])
    return names


def _answer(verdict: Verdict, verbose: str | None) -> PlainTextResponse:
    is_verbose = verbose is not None and verbose.lower() not in ("false", "0")
    text = str(verdict) if is_verbose or not verdict.ok else "ok"
    return PlainTextResponse(text, 200 if verdict.ok else 503)


def loggers() -> list[str]:
    """Return the names of KVStow's loggers that exist."""
    below = (name for name in logging.root.manager.loggerDict if name.startswith(f"{_ROOT}."))
    return [_ROOT, *sorted(below)]


def level_of(name: str) -> LogLevelView:
    level = logging.getLevelName(logging.getLogger(name).getEffectiveLevel()).lower()
    return LogLevelView(logger=name, level=level)


router = StrictRouter(tags=["server"])


# -- for people and for generators of clients ----------------------------------------------------------------------


async def get_page() -> HTMLResponse:
    """Show the status page. It is always the same, and its script reads `/v1/overview`."""
    page = await run_in_threadpool(status_page)
    return HTMLResponse(page.html, headers=dict(page.headers))


async def get_openapi(request: Request) -> Response:
    """Show the OpenAPI description of all routes."""
    description: Description = request.app.openapi
    return Response(await run_in_threadpool(lambda: description.document), media_type="application/json")


async def get_docs(request: Request) -> HTMLResponse:
    """Show the OpenAPI description as a page for people."""
    description: Description = request.app.openapi
    page = await run_in_threadpool(lambda: description.page)
    return HTMLResponse(page.html, headers=dict(page.headers))


_lenient = APIRouter(include_in_schema=False)
for _place, _page in (("/", get_page), ("/openapi.json", get_openapi), ("/docs", get_docs)):
    _lenient.add_api_route(_place, _page, methods=["GET"])
router.routes.extend(_lenient.routes)


@router.get("/v1/overview", response_model=OverviewView, responses=reading())
async def get_overview(
    request: Request,
    pool: Annotated[str | None, Query(description="The pool that it is about; without it, the whole host")] = None,
) -> Response:
    """Show the state in one document, which the status page and `kvstow top` use. It is made at most once a second. For
    a pool that does not exist, it has `is_missing`, and is about the whole host."""
    overviews: Overviews = request.app.state.overviews
    return Response(overviews.encoded(pool), media_type="application/json")


# -- settings and levels of the log --------------------------------------------------------------------------------


@router.get("/v1/info", responses=reading())
async def get_info(app: App) -> InfoView:
    """Show version, mode and settings, without secrets."""
    return info_view(app)


@router.get("/v1/loglevel", responses=reading())
async def get_log_levels() -> LogLevelsView:
    """List every logger of KVStow and its level."""
    return LogLevelsView(items=[level_of(name) for name in loggers()])


@router.put("/v1/loglevel", responses=changing())
async def set_log_level(body: LogLevelBody) -> LogLevelView:
    """Set the level of one logger."""
    if body.logger not in loggers():
        raise ConfigError("logger", body.logger, ", ".join(loggers()))
    logging.getLogger(body.logger).setLevel(body.level.upper())
    return level_of(body.logger)


# -- events and diagnosis ---------------------------------------------------------------------------------------------

LastEventId = Annotated[str | None, Header(description="Continue after the event with this id")]


def _check_types(text: str) -> str:
    if unknown := sorted(set(filter(None, text.split(","))) - set(EVENT_TYPES)):
        raise PydanticCustomError(
            "unknown_name",
            "there is no type {unknown}; there are: {allowed}",
            {"unknown": ", ".join(unknown), "allowed": ", ".join(EVENT_TYPES)},
        )
    return text


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
    app: App,
    pool: AnyPool,
    types: Annotated[
        str,
        AfterValidator(_check_types),
        Query(
            description=f"Any of {', '.join(EVENT_TYPES)}, separated by commas; if empty, all but "
            f"{' and '.join(BLOCK_EVENTS)}. `lost` is always sent",
            examples=["state,operation"],
        ),
    ] = "",
    recent: Annotated[
        int, Query(ge=0, le=1000, description="Begin with this many of the last events, unless Last-Event-ID is given")
    ] = 0,
    last_event_id: LastEventId = None,
) -> StreamingResponse:
    """Stream events from now on, or after the last one that the client has read."""
    wanted = set(filter(None, types.split(","))) or set(EVENT_TYPES) - set(BLOCK_EVENTS)
    if pool is None and (not app.directory.is_node or not wanted.isdisjoint(BLOCK_EVENTS)):
        pool = choose_pool(app.directory, None)
    return LimitedStream(app.streams.open(wanted, pool, after=last_event_id, recent=recent), app.streams.limit)


@router.get("/v1/doctor", responses=reading())
async def get_doctor(request: Request, app: App) -> DoctorView:
    """Show what is wrong, the worst first: each condition with what mends it and the numbers behind it. Everything is
    measured anew, but at most once a second for clients that may not make changes. `/v1/readiness` has the same
    conditions from the last measurements."""
    await app.watch.look(max_age=_MAX_AGE_FOR_STRANGERS if is_stranger(request.scope) else 0.0)
    return app.conditions.find()
