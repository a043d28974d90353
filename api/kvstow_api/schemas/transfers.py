"""Loads and stores in flight."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvstow.messages import Direction
from kvstow_api.schemas.base import Query, View


class TransfersQuery(Query):
    direction: Direction | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class PendingView(View):
    """Ops that not every rank has finished. Bytes are of one rank."""

    loads: int
    stores: int
    load_blocks: int
    store_blocks: int
    load_bytes: int
    store_bytes: int
    oldest_seconds: float
    stuck: int


class TransferView(View):
    op_id: int
    direction: Direction
    state: Literal["queued", "running", "stuck", "quarantined"]
    blocks: int
    bytes: int
    age_seconds: float
    pending_ranks: list[int]
    failed: bool
    request_id: str


class TransfersView(View):
    """`pending` counts all; `items` are the oldest."""

    pending: PendingView
    items: list[TransferView]
