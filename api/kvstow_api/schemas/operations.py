"""Long-running operations."""

from __future__ import annotations

from datetime import datetime

from pydantic import ConfigDict

from kvstow_api.operations import OperationKind, OperationState
from kvstow_api.schemas.base import Query, View
from kvstow_api.schemas.pools import RemovedView


class OperationsQuery(Query):
    kind: OperationKind | None = None
    state: OperationState | None = None


class ProgressView(View):
    done: int
    total: int
    unit: str


class OperationView(View):
    """`waiting`: it cannot go on until transfers or leases end. `result` is null while it runs."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "resize-1f0c9be2a47d",
                    "kind": "resize",
                    "state": "running",
                    "waiting": True,
                    "progress": {"done": 1024, "total": 4096, "unit": "slots"},
                    "created": "2026-11-02T09:30:00Z",
                    "started": "2026-11-02T09:30:00Z",
                    "ended": None,
                    "error": None,
                    "result": None,
                }
            ]
        }
    )

    id: str
    kind: OperationKind
    state: OperationState
    waiting: bool
    progress: ProgressView
    created: datetime
    started: datetime | None
    ended: datetime | None
    error: str | None
    result: RemovedView | None


class OperationsView(View):
    """Newest first."""

    items: list[OperationView]
