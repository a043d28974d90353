"""Engines that use the host's pools, and what their keys mean."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from starlette.concurrency import run_in_threadpool

from kvstow.errors import NotFoundError
from kvstow_api.answers import DetachView, NamespacesView, SessionsView
from kvstow_api.appstate import App
from kvstow_api.openapi import changing, reading
from kvstow_api.queries import DetachQuery, StrictRouter
from kvstow_api.readings import sessions_now

router = StrictRouter(prefix="/v1", tags=["sessions"])

SessionId = Annotated[str, Path(description="As in the list", examples=["7c1e4f0a9b2d3c58"])]


@router.get("/sessions", responses=reading())
async def list_sessions(app: App) -> SessionsView:
    """All sessions, the oldest first, lost ones included."""
    return SessionsView(items=sessions_now(app.directory, app.sampler), rejected=dict(app.directory.rejected))


@router.delete("/sessions/{session_id}", status_code=202, responses=changing(404, 409, body=False))
async def detach_session(app: App, session_id: SessionId, query: Annotated[DetachQuery, Query()]) -> DetachView:
    """Detach an engine: its connections end at once. What the session holds is freed when its processes have ended,
    and not before, because until then they may still copy; `kill` ends them."""
    if not await run_in_threadpool(app.directory.detach, session_id, kill=query.kill):
        raise NotFoundError(f"there is no session {session_id!r}; /v1/sessions lists them")
    return DetachView(id=session_id, killed=query.kill)


@router.get("/namespaces", responses=reading())
async def list_namespaces(app: App) -> NamespacesView:
    """All namespaces: engines with the same one share blocks."""
    return NamespacesView(items=list(app.directory.namespaces()))
