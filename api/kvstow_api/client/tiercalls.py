"""The calls about the fleet tier."""

from __future__ import annotations

from kvstow.tier.writepolicy import WriteMode
from kvstow_api.client.call import Call, decoded, fields, get, params, work
from kvstow_api.views.operations import OperationView
from kvstow_api.views.tier import TierBypassView, TierPurgedView, TierView

_PATIENCE = 60.0
"""Seconds that calls to a store which are under way may take."""


def tier() -> Call[TierView]:
    return get("/v1/tier", TierView)


def attach_tier(url: str, *, write: WriteMode | None = None) -> Call[TierView]:
    """Use a store. Fails with status 409 if one is attached, or none can be."""
    body = fields(url=url, write=write)
    return Call("POST", "/v1/tier/attach", decoded(TierView), body=body, patience=_PATIENCE)


def detach_tier() -> Call[TierView]:
    """Stop using the store. Answered when nothing touches the pools' memory for it."""
    return Call("POST", "/v1/tier/detach", decoded(TierView), patience=_PATIENCE)


def bypass_tier(*, bypassed: bool, ttl_seconds: float | None = None, pool: str | None = None) -> Call[TierBypassView]:
    """Leave the store alone in all pools or in one, or use it again."""
    body = {"bypassed": bypassed, "ttl_seconds": ttl_seconds}
    return Call("PUT", "/v1/tier/bypass", decoded(TierBypassView), params(pool=pool), body=body)


def purge_tier(fingerprint: str, *, wait: float | None = None) -> Call[TierPurgedView | OperationView]:
    """Remove all objects of a fingerprint from the store, for all nodes that use it."""
    return work("POST", "/v1/tier/purge", TierPurgedView, wait, {"fingerprint": fingerprint})


def name_tier_weights(weights_id: str, *, pool: str | None = None, namespace: str | None = None) -> Call[TierView]:
    """Name the weights that an engine has now, after it has reset its prefix cache."""
    body = fields(weights_id=weights_id, namespace=namespace)
    return Call("POST", "/v1/tier/weights", decoded(TierView), params(pool=pool), body=body)
