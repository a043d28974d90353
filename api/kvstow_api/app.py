"""The ASGI application."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware

from kvstow_api import problems
from kvstow_api.admission import AdmissionMiddleware
from kvstow_api.appstate import AppState
from kvstow_api.auth import AuthMiddleware, Credentials
from kvstow_api.body import BodyMiddleware
from kvstow_api.head import HeadMiddleware
from kvstow_api.host import ApiHost
from kvstow_api.metrics import Collector
from kvstow_api.openapi import Description
from kvstow_api.page.live import StatusPage
from kvstow_api.regularfile import TokenFile
from kvstow_api.requests import HttpCounters, RequestMiddleware
from kvstow_api.routes import ROUTERS

logger = logging.getLogger("kvstow.api")


def create_app(host: ApiHost) -> FastAPI:
    """The admin API of one engine. Several applications may live in one process, each with its own host.

    The lifespan must run: it measures the event loop, and ends operations when the server stops. Registers a
    collector with the host's registry. Raises `ConfigError` if the token file cannot be used.
    """
    credentials = Credentials(
        admins=_tokens("token_file", host.token_file),
        viewers=_tokens("viewer_token_file", host.viewer_token_file),
        agent=host.agent_token,
        certificates=host.client_certificates,
    )
    http = HttpCounters()
    state = AppState.of(host, http, credentials)
    app = FastAPI(
        title="KVStow admin API",
        description="Watch and control the KV cache in host memory under traffic.",
        version=host.version,
        openapi_url=None,  # our own route serves it
        docs_url=None,  # it would load its scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
        middleware=[
            Middleware(RequestMiddleware, counters=http, journal=state.journal),
            Middleware(AdmissionMiddleware, allowed_hosts=host.allowed_hosts),
            Middleware(AuthMiddleware, credentials=credentials, addresses=host.addresses),
            Middleware(BodyMiddleware),
            Middleware(HeadMiddleware),
        ],
    )
    app.state.kvstow = state
    app.state.page = StatusPage(state)
    problems.install(app)
    for router in ROUTERS:
        app.router.routes.extend(router.routes)  # include_router would build all of them again (13 ms)
    app.openapi = Description(app)  # type: ignore[method-assign]
    host.registry.register(Collector(state))
    return app


def _tokens(setting: str, path: Path | None) -> TokenFile | None:
    if path is None:
        return None
    tokens = TokenFile(path)
    if tokens.exposure is not None:
        logger.warning("%s %s: %s", setting, path, tokens.exposure)
    return tokens


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: AppState = app.state.kvstow
    state.loop.start()
    state.sampler.start()
    state.watch.start()
    try:
        yield
    finally:
        await state.watch.stop()
        await state.sampler.stop()
        await state.loop.stop()
        await run_in_threadpool(state.operations.close)
