"""Answers to work that may outlast its request."""

from __future__ import annotations

from fastapi import HTTPException
from pydantic import TypeAdapter
from starlette.responses import Response

from kvstow.errors import ConflictError
from kvstow_api.openapi import Responses
from kvstow_api.operations import Operation
from kvstow_api.views.operations import OperationView

_OPERATION = TypeAdapter(OperationView)

ACCEPTED: Responses = {
    202: {
        "model": OperationView,
        "description": "It goes on as an operation",
        "headers": {
            "Location": {"description": "The operation", "schema": {"type": "string"}},
            "Retry-After": {"description": "Seconds until it is worth a look", "schema": {"type": "string"}},
        },
    }
}


async def has_succeeded(operation: Operation, wait: float) -> bool:
    """Whether it ended well within `wait` seconds; False while it runs. Raises for another end."""
    view = await operation.wait(wait)
    if view.state == "cancelled":
        raise ConflictError(f"operation {view.id} was cancelled")
    if view.state == "failed":
        raise operation.failure or HTTPException(500, f"operation {view.id} failed: {view.error}")
    return view.state == "succeeded"


def accepted(operation: Operation) -> Response:
    view = operation.view
    headers = {"Location": f"/v1/operations/{view.id}", "Retry-After": "1"}
    return Response(_OPERATION.dump_json(view), 202, headers, "application/json")
