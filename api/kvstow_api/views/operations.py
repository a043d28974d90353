"""The answers about operations."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from kvstow_api.views.pools import RemovedView

OperationKind = Literal["evict", "purge", "resize"]
OperationState = Literal["running", "succeeded", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """How many slots were visited, and of how many."""

    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationView:
    """One operation at one moment. `waiting`: it cannot continue until transfers or leases end.

    `result` is null while the operation runs and when it has failed; of a cancelled one, it says what was done.
    """

    id: str
    pool: str
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
class OperationsView:
    """Newest first; `next_page_token` is null on the last page."""

    items: list[OperationView]
    next_page_token: str | None
