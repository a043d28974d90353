"""Blocks in a pool."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvstow.keys import format_key
from kvstow.stats import BlockView as Block
from kvstow.stats import SlotState
from kvstow_api.schemas.base import Query, View


class BlocksQuery(Query):
    page_size: Annotated[int, Field(ge=1, le=1000)] = 100
    page_token: Annotated[str, Field(description="`next_page_token` of the page before")] = ""


class BlockView(View):
    """One block that can be loaded."""

    key: str
    slot: int
    state: SlotState
    age_seconds: float
    idle_seconds: float
    leases: int
    pin_ttl_seconds: float | None

    @classmethod
    def of(cls, block: Block) -> BlockView:
        return cls(
            key=format_key(block.key),
            slot=block.slot,
            state=block.state,
            age_seconds=block.age_seconds,
            idle_seconds=block.idle_seconds,
            leases=block.leases,
            pin_ttl_seconds=block.pin_ttl_seconds,
        )


class BlocksView(View):
    """One page, in order of slots; `next_page_token` is null on the last one."""

    items: list[BlockView]
    next_page_token: str | None
