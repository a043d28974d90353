"""The routes."""

from fastapi import APIRouter

from kvstow_api.routes import contexts, engine, pools, server

ROUTERS: tuple[APIRouter, ...] = (
    server.probes_router,
    server.router,
    engine.router,
    pools.router,
    contexts.router,
    engine.sessions_router,
    engine.tier_router,
    pools.operations_router,
)
