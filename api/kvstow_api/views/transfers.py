"""Loads and stores in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvstow.messages import Direction
from kvstow_api.views.base import View

TransferState = Literal["queued", "running", "stuck", "quarantined"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingView(View):
    """Ops that not every rank has finished. Bytes are of one rank."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {
            "examples": [
                {
                    "loads": 1,
                    "stores": 2,
                    "load_blocks": 128,
                    "store_blocks": 64,
                    "load_bytes": 268435456,
                    "store_bytes": 134217728,
                    "oldest_seconds": 0.004,
                    "stuck": 0,
                }
            ]
        }
    }

    loads: int
    stores: int
    load_blocks: int
    store_blocks: int
    load_bytes: int
    store_bytes: int
    oldest_seconds: float
    stuck: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferView(View):
    """One op: `queued` (no rank has spoken), `running` (some have), `stuck` (too old), or `quarantined` (a store
    given up, whose slots wait for the last ranks). `idle_ranks`: those of `pending_ranks` that have nothing under
    way: their host has not given them the op, or has not collected or passed on its completion."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {
            "examples": [
                {
                    "op_id": 4711,
                    "direction": "load",
                    "state": "running",
                    "blocks": 128,
                    "bytes": 268435456,
                    "age_seconds": 0.004,
                    "pending_ranks": [1],
                    "idle_ranks": [],
                    "failed": False,
                    "request_id": "cmpl-8d1f",
                }
            ]
        }
    }

    op_id: int
    direction: Direction
    state: TransferState
    blocks: int
    bytes: int
    age_seconds: float
    pending_ranks: list[int]
    idle_ranks: list[int]
    failed: bool
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransfersView(View):
    """`pending` counts all; `items` are those in flight for longest."""

    pending: PendingView
    items: list[TransferView]
