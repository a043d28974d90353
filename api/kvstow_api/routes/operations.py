"""Long-running operations."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from kvstow_api.openapi import changing, reading
from kvstow_api.schemas.operations import OperationsQuery, OperationsView, OperationView
from kvstow_api.services import Use

router = APIRouter(prefix="/v1/operations", tags=["operations"])

_CANCEL_SECONDS = 0.1  # a cancelled operation ends within a slice; wait that long to show it


@router.get("", responses=reading(422))
async def list_operations(use: Use, query: Annotated[OperationsQuery, Query()]) -> OperationsView:
    """Operations that run, and the last ones that have ended; newest first."""
    return OperationsView(
        items=[
            OperationView.model_validate(view)
            for view in use.operations.views()
            if query.kind in (None, view.kind) and query.state in (None, view.state)
        ]
    )


@router.get("/{operation_id}", responses=reading(404))
async def get_operation(use: Use, operation_id: str) -> OperationView:
    """One operation."""
    return OperationView.model_validate(use.operations.get(operation_id).view)


@router.post("/{operation_id}/cancel", responses=changing(404, body=False))
async def cancel_operation(use: Use, operation_id: str) -> OperationView:
    """Stop at the next slice; what was done stays done. An operation that has ended stays as it is."""
    operation = use.operations.get(operation_id)
    operation.cancel()
    return OperationView.model_validate(await operation.wait(_CANCEL_SECONDS))
