"""Long-running operations."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Literal

from kvstow_api.views.base import View
from kvstow_api.views.pools import RemovedView

OperationKind = Literal["evict", "purge", "resize"]
OperationState = Literal["running", "succeeded", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView(View):
    """Slots looked at, of how many."""

    done: int
    total: int
    unit: str = "slots"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationView(View):
    """One operation at one moment. `waiting`: it cannot go on until transfers or leases end.

    `result` says what was done so far when it was cancelled, and is null while it runs or when it failed.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {
            "examples": [
                {
                    "id": "resize-1f0c9be2a47d",
                    "kind": "resize",
                    "dry_run": False,
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
    }

    id: str
    kind: OperationKind
    dry_run: bool = False
    state: OperationState
    waiting: bool
    progress: ProgressView
    created: datetime
    started: datetime | None
    ended: datetime | None
    error: str | None
    result: RemovedView | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationsView(View):
    """Newest first; `next_page_token` is null on the last page."""

    items: list[OperationView]
    next_page_token: str | None
