"""The ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware

from kvstow_api import problems
from kvstow_api.appstate import AppState
from kvstow_api.auth import AuthMiddleware
from kvstow_api.host import ApiHost
from kvstow_api.metrics import Collector
from kvstow_api.middleware import (
    AdmissionMiddleware,
    AnonymousMiddleware,
    BodyMiddleware,
    HeadMiddleware,
    RequestMiddleware,
)
from kvstow_api.openapi import Description
from kvstow_api.overview import Overviews
from kvstow_api.routes import ROUTERS


def create_app(host: ApiHost) -> FastAPI:
    """Make the admin API of one host. A process may have several applications, each with its own host.

    The lifespan must run: it measures the event loop, and ends operations when the server stops. This registers a
    collector with the host's registry. Raises `ConfigError` if the token file cannot be used.
    """
    state = AppState(host)
    app = FastAPI(
        title="KVStow admin API",
        description="Watch and control the KV cache in host memory under traffic.",
        version=host.version,
        openapi_url=None,  # a route of this package serves it
        docs_url=None,  # FastAPI's page would load its scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
        middleware=[
            Middleware(RequestMiddleware, counters=state.http, journal=state.journal),
            Middleware(AdmissionMiddleware, allowed_hosts=host.allowed_hosts),
            Middleware(AuthMiddleware, credentials=state.credentials, addresses=host.addresses),
            Middleware(AnonymousMiddleware),
            Middleware(BodyMiddleware),
            Middleware(HeadMiddleware),
        ],
    )
    app.state.kvstow = state
    app.state.overviews = Overviews(state)
    problems.install(app)
    for router in ROUTERS:
        app.router.routes.extend(router.routes)  # `include_router` would build all of them again, which takes 13 ms
    app.openapi = Description(app)  # type: ignore[method-assign]
    host.registry.register(Collector(state))
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: AppState = app.state.kvstow
    tasks = [asyncio.create_task(part.run()) for part in (state.loop, state.sampler, state.watch, state.conditions)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await state.operations.close()
