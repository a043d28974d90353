"""The routes."""

from fastapi import APIRouter

from kvstow_api.routes import engine, operations, pools, probes, server, sessions, tier

ROUTERS: tuple[APIRouter, ...] = (
    probes.router,
    server.router,
    engine.router,
    pools.router,
    sessions.router,
    tier.router,
    operations.router,
)
