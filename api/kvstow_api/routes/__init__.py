"""The routes, one module per noun."""

from fastapi import APIRouter

from kvstow_api.routes import (
    blocks,
    bypass,
    drain,
    health,
    info,
    lookup,
    metrics,
    operations,
    pools,
    ranks,
    readiness,
    stats,
    transfers,
)

ROUTERS: tuple[APIRouter, ...] = (
    health.router,
    metrics.router,
    info.router,
    readiness.router,
    stats.router,
    pools.router,
    blocks.router,
    lookup.router,
    ranks.router,
    transfers.router,
    drain.router,
    bypass.router,
    operations.router,
)
