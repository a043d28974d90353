"""The calls about operations."""

from __future__ import annotations

from urllib.parse import quote

from kvstow_api.answers import OperationKind, OperationState, OperationsView, OperationView
from kvstow_api.client.call import Call, decoded, get, nothing, params


def operations(
    *,
    kind: OperationKind | None = None,
    state: OperationState | None = None,
    pool: str | None = None,
    page_size: int | None = None,
    page_token: str | None = None,
) -> Call[OperationsView]:
    given = {"kind": kind, "state": state, "pool": pool, "page_size": page_size, "page_token": page_token}
    return get("/v1/operations", OperationsView, **given)


def operation(operation_id: str, *, wait: float | None = None) -> Call[OperationView]:
    """When it ends, or after `wait` seconds."""
    path = f"/v1/operations/{quote(operation_id, safe='')}"
    return Call("GET", path, decoded(OperationView), params(wait=wait), patience=wait or 0.0)


def cancel(operation_id: str) -> Call[OperationView]:
    return Call("POST", f"/v1/operations/{quote(operation_id, safe='')}/cancel", decoded(OperationView))


def forget(operation_id: str) -> Call[None]:
    """Remove an operation that has ended from the list."""
    return Call("DELETE", f"/v1/operations/{quote(operation_id, safe='')}", nothing)
