"""The routes."""

from fastapi import APIRouter

from kvstow_api.routes import engine, operations, pools, probes, server

ROUTERS: tuple[APIRouter, ...] = (probes.router, server.router, engine.router, pools.router, operations.router)
