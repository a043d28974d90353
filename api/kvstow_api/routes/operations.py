"""Long-running operations."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from kvstow_api.openapi import changing, reading
from kvstow_api.requests import CHANGED_NOTHING
from kvstow_api.schemas.operations import OperationQuery, OperationsQuery
from kvstow_api.schemas.paging import token_of
from kvstow_api.services import Use
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views.operations import OperationsView, OperationView

router = APIRouter(prefix="/v1/operations", tags=["operations"], route_class=StrictRoute)

OperationId = Annotated[str, Path(description="As the list, or a `Location`, has it")]

_CANCEL_SECONDS = 0.1  # a cancelled operation ends within a slice; wait that long to show it


@router.get("", responses=reading())
async def list_operations(use: Use, query: Annotated[OperationsQuery, Query()]) -> OperationsView:
    """Operations that run, and the last ones that have ended; newest first."""
    before = query.position
    found = [
        operation
        for operation in use.operations.all()
        if query.kind in (None, operation.view.kind)
        and query.state in (None, operation.view.state)
        and (not before or operation.number < before)
    ]
    page = found[: query.page_size]
    return OperationsView(
        items=[operation.view for operation in page],
        next_page_token=token_of(page[-1].number if len(found) > len(page) else None),
    )


@router.get("/{operation_id}", responses=reading(404))
async def get_operation(
    use: Use, operation_id: OperationId, query: Annotated[OperationQuery, Query()]
) -> OperationView:
    """One operation, as it is at its end or after `wait` seconds."""
    return await use.operations.get(operation_id).wait(query.wait)


@router.delete("/{operation_id}", status_code=204, responses=changing(404, 409, body=False))
async def forget_operation(use: Use, operation_id: OperationId) -> Response:
    """Take an operation that has ended off the list."""
    use.operations.forget(operation_id)
    return Response(status_code=204)


@router.post("/{operation_id}/cancel", responses=changing(404, body=False))
async def cancel_operation(use: Use, request: Request, operation_id: OperationId) -> OperationView:
    """Stop at the next slice; what was done stays done. An operation that has ended stays as it is."""
    operation = use.operations.get(operation_id)
    request.scope[CHANGED_NOTHING] = not operation.running
    operation.cancel()
    return await operation.wait(_CANCEL_SECONDS)
