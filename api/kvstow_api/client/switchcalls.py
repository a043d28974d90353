"""The calls that drain pools, or bypass them."""

from __future__ import annotations

from typing import Literal

from kvstow.status import BypassStatus, DrainStatus
from kvstow_api.client.call import Call, decoded, get, params


def drain_status(*, pool: str | None = None) -> Call[DrainStatus]:
    return get("/v1/drain", DrainStatus, pool=pool)


def drain(
    *,
    mode: Literal["stop_stores", "all"] = "all",
    deadline_seconds: float | None = None,
    pool: str | None = None,
) -> Call[DrainStatus]:
    """All pools, or one."""
    body = {"mode": mode, "deadline_seconds": deadline_seconds}
    return Call("PUT", "/v1/drain", decoded(DrainStatus), params(pool=pool), body=body)


def undrain(*, pool: str | None = None) -> Call[DrainStatus]:
    return Call("DELETE", "/v1/drain", decoded(DrainStatus), params(pool=pool))


def bypass_status(*, pool: str | None = None) -> Call[BypassStatus]:
    return get("/v1/bypass", BypassStatus, pool=pool)


def bypass(*, load: bool, store: bool, ttl_seconds: float | None = None, pool: str | None = None) -> Call[BypassStatus]:
    """Switch directions off in all pools, or in one; both False switches both on."""
    body = {"load": load, "store": store, "ttl_seconds": ttl_seconds}
    return Call("PUT", "/v1/bypass", decoded(BypassStatus), params(pool=pool), body=body)
