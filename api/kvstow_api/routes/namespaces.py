"""Namespaces and quotas, which other caches have."""

from __future__ import annotations

from fastapi import APIRouter

from kvstow.errors import NotFoundError

router = APIRouter(prefix="/v1/namespaces", include_in_schema=False)

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@router.api_route("", methods=_METHODS)
@router.api_route("/{rest:path}", methods=_METHODS)
async def no_namespaces(rest: str = "") -> None:
    """404, and why."""
    raise NotFoundError(
        "KVStow has no namespaces and no quotas: keys carry the cache salt; purge by key_prefixes, or by age, instead"
    )
