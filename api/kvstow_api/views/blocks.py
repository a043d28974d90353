"""Blocks in a pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvstow.keys import format_key
from kvstow.stats import BlockView as Block
from kvstow.stats import SlotState
from kvstow_api.views.base import View

BlockState = Literal["cached", "leased", "protected"]
"""What slots of blocks that can be loaded may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView(View):
    """One block that can be loaded. `protection_ttl_seconds` is null if it is not protected, or without an end."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {
            "examples": [
                {
                    "key": "00003d2c1b0a",
                    "slot": 17,
                    "state": "protected",
                    "age_seconds": 12.5,
                    "idle_seconds": 0.4,
                    "leases": 0,
                    "protection_ttl_seconds": 600.0,
                }
            ]
        }
    }

    key: str
    slot: int
    state: SlotState
    age_seconds: float
    idle_seconds: float
    leases: int
    protection_ttl_seconds: float | None

    @classmethod
    def made(cls, block: Block) -> BlockView:
        return cls(
            key=format_key(block.key),
            slot=block.slot,
            state=block.state,
            age_seconds=block.age_seconds,
            idle_seconds=block.idle_seconds,
            leases=block.leases,
            protection_ttl_seconds=block.protection_ttl_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksView(View):
    """One page, in order of slots; `next_page_token` is null on the last one."""

    items: list[BlockView]
    next_page_token: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupView(View):
    """Which of the keys are in the pool. `leading` counts those from the first on. `refusal`: why loads are
    answered with a miss all the same, null where they are not."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {"examples": [{"leading": 2, "present": [True, True, False], "refusal": None}]}
    }

    leading: int
    present: list[bool]
    refusal: str | None
