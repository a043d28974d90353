"""What machines poll: the probes /livez, /readyz (also /health and /healthz) and /startupz, and /metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from starlette.responses import Response

from kvstow_api.appstate import App
from kvstow_api.metrics.families import MEDIA_TYPE, render
from kvstow_api.openapi import Responses, reading
from kvstow_api.probe import Probe, Verdict

router = APIRouter(tags=["probes"], default_response_class=PlainTextResponse)

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


async def probe(request: Request, app: App, verbose: Verbose = None, exclude: Exclude = "") -> PlainTextResponse:
    """`ok`, or one line per check."""
    chosen = app.health.probes[_PROBE_OF[request.scope["route"].path]]
    return _answer(chosen.run(_known(chosen, exclude)), verbose)


async def check(request: Request, app: App, check: CheckName, verbose: Verbose = None) -> PlainTextResponse:
    """One check of a probe. Here an informational check fails the probe, too."""
    chosen = app.health.probes[_PROBE_OF[request.scope["route"].path.removesuffix("/{check}")]]
    if check not in chosen.checks:
        raise HTTPException(404, f"{chosen.name} has no check {check!r}; it has: {', '.join(chosen.checks)}")
    return _answer(chosen.run_one(check), verbose)


for _path in _PROBE_OF:
    for _route, _endpoint, _codes in ((_path, probe, (422,)), (f"{_path}/{{check}}", check, (404,))):
        _shared: dict[str, Any] = {"responses": {**_PROBE_RESPONSES, **reading(*_codes, guarded=False)}}
        router.add_api_route(_route, _endpoint, methods=["GET"], **_shared)


@router.get("/metrics", response_class=Response, responses={**_METRICS_RESPONSES, **reading(guarded=False)})
async def metrics(app: App) -> Response:
    """All metrics in Prometheus' text format, regardless of the Accept header."""
    return Response(render(app.host.registry), media_type=MEDIA_TYPE)


def _known(chosen: Probe, exclude: str) -> frozenset[str]:
    """The names in `exclude`. Raises a validation error for a name that is not a check of the probe."""
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
