"""Long-running operations, and the answers of routes that start one."""

from __future__ import annotations

from typing import Annotated

from fastapi import HTTPException, Path, Query, Request, Response
from pydantic import TypeAdapter

from kvstow.errors import ConflictError
from kvstow_api.answers import OperationsView, OperationView
from kvstow_api.appstate import App
from kvstow_api.openapi import Responses, changing, reading
from kvstow_api.operations import Operation
from kvstow_api.queries import OperationQuery, OperationsQuery, StrictRouter, token_of
from kvstow_api.requests import CHANGED_NOTHING

router = StrictRouter(prefix="/v1/operations", tags=["operations"])

OperationId = Annotated[str, Path(description="As in the list, or in a `Location`")]

ACCEPTED: Responses = {
    202: {
        "model": OperationView,
        "description": "The work continues as an operation",
        "headers": {
            "Location": {"description": "The operation", "schema": {"type": "string"}},
            "Retry-After": {"description": "Seconds to wait before asking for it", "schema": {"type": "string"}},
        },
    }
}

_CANCEL_SECONDS = 0.1  # a cancelled operation ends within a slice; wait that long to show it
_OPERATION = TypeAdapter(OperationView)


@router.get("", responses=reading())
async def list_operations(app: App, query: Annotated[OperationsQuery, Query()]) -> OperationsView:
    """Operations that run, and the last ones that have ended; newest first."""
    before = query.position
    found = [
        operation
        for operation in app.operations.all()
        if query.kind in (None, operation.view.kind)
        and query.state in (None, operation.view.state)
        and query.pool in (None, operation.view.pool)
        and (not before or operation.number < before)
    ]
    page = found[: query.page_size]
    return OperationsView(
        items=[operation.view for operation in page],
        next_page_token=token_of(page[-1].number if len(found) > len(page) else None),
    )


@router.get("/{operation_id}", responses=reading(404))
async def get_operation(
    app: App, operation_id: OperationId, query: Annotated[OperationQuery, Query()]
) -> OperationView:
    """One operation, when it ends or after `wait` seconds."""
    return await app.operations.get(operation_id).wait(query.wait)


@router.delete("/{operation_id}", status_code=204, responses=changing(404, 409, body=False))
async def forget_operation(app: App, operation_id: OperationId) -> Response:
    """Remove an operation that has ended from the list."""
    app.operations.forget(operation_id)
    return Response(status_code=204)


@router.post("/{operation_id}/cancel", responses=changing(404, body=False))
async def cancel_operation(app: App, request: Request, operation_id: OperationId) -> OperationView:
    """Stop an operation after the current slice; what was done stays done. One that has ended stays as it is."""
    operation = app.operations.get(operation_id)
    request.scope[CHANGED_NOTHING] = not operation.running
    operation.cancel()
    return await operation.wait(_CANCEL_SECONDS)


async def has_succeeded(operation: Operation, wait: float) -> bool:
    """Whether it succeeded within `wait` seconds; False while it runs. Raises if it failed or was cancelled."""
    view = await operation.wait(wait)
    if view.state == "cancelled":
        raise ConflictError(f"operation {view.id} was cancelled")
    if view.state == "failed":
        raise operation.failure or HTTPException(500, f"operation {view.id} failed: {view.error}")
    return view.state == "succeeded"


def accepted(operation: Operation) -> Response:
    """The answer 202, which names the operation."""
    view = operation.view
    headers = {"Location": f"/v1/operations/{view.id}", "Retry-After": "1"}
    return Response(_OPERATION.dump_json(view), 202, headers, "application/json")
