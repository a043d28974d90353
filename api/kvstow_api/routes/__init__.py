"""The routes, one module per noun."""

from fastapi import APIRouter

from kvstow_api.routes import (
    blocks,
    bypass,
    config,
    description,
    doctor,
    drain,
    events,
    health,
    info,
    lookup,
    metrics,
    namespaces,
    operations,
    page,
    pools,
    ranks,
    readiness,
    stats,
    transfers,
)

ROUTERS: tuple[APIRouter, ...] = (
    health.router,
    metrics.router,
    page.router,
    description.router,
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
    config.router,
    events.router,
    doctor.router,
    namespaces.router,
)
