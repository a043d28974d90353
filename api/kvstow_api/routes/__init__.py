"""The routes."""

from fastapi import APIRouter

from kvstow_api.routes import engine, operations, pools, probes, server, sessions

ROUTERS: tuple[APIRouter, ...] = (
    probes.router,
    server.router,
    engine.router,
    pools.router,
    sessions.router,
    operations.router,
)
