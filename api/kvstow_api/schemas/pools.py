"""Pools, and what can be done with them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvstow.stats import EngineStats
from kvstow_api.schemas.base import Body, Count, KeyList, OnlyTrue, PositiveSeconds, Query, Seconds, View, require_one

POOL_NAME = "host"


class SlotsView(View):
    """Slots by state; they add up to `usable_slots`."""

    free: int
    filling: int
    cached: int
    leased: int
    pinned: int
    quarantined: int


class PoolView(View):
    """A pool. Slots and bytes are of one rank; every rank has the same."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "host",
                    "slot_bytes": 2097152,
                    "block_tokens": 16,
                    "capacity_slots": 4096,
                    "capacity_bytes": 8589934592,
                    "max_capacity_slots": 8192,
                    "max_capacity_bytes": 17179869184,
                    "usable_slots": 4096,
                    "usable_bytes": 8589934592,
                    "slots": {"free": 96, "filling": 8, "cached": 3976, "leased": 16, "pinned": 0, "quarantined": 0},
                    "policy": "lru",
                    "leases": 2,
                    "num_ranks": 2,
                }
            ]
        }
    )

    name: str
    slot_bytes: int
    block_tokens: int
    capacity_slots: int
    capacity_bytes: int
    max_capacity_slots: int
    max_capacity_bytes: int
    usable_slots: int
    usable_bytes: int
    slots: SlotsView
    policy: str
    leases: int
    num_ranks: int

    @classmethod
    def of(cls, stats: EngineStats, *, max_capacity_slots: int, num_ranks: int) -> PoolView:
        return cls(
            name=POOL_NAME,
            slot_bytes=stats.slot_bytes,
            block_tokens=stats.block_tokens,
            capacity_slots=stats.capacity_slots,
            capacity_bytes=stats.capacity_slots * stats.slot_bytes,
            max_capacity_slots=max_capacity_slots,
            max_capacity_bytes=max_capacity_slots * stats.slot_bytes,
            usable_slots=stats.usable_slots,
            usable_bytes=stats.usable_slots * stats.slot_bytes,
            slots=SlotsView.model_validate(stats.slots),
            policy=stats.policy,
            leases=stats.leases,
            num_ranks=num_ranks,
        )


class PoolsView(View):
    items: list[PoolView]


class PoolPatch(Body):
    """New settings of a pool; what is left out stays. Bytes are of one rank, taken down to whole slots."""

    capacity_slots: Count | None = Field(None, examples=[2048])
    capacity_bytes: Count | None = None
    policy: Literal["lru", "arc"] | None = None
    dry_run: bool = False

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.capacity_slots is not None or self.capacity_bytes is not None:
            require_one(self, "capacity_slots", "capacity_bytes")
        elif self.policy is None:
            allowed = "capacity_slots, capacity_bytes, policy"
            raise PydanticCustomError("nothing_given", "at least one of {allowed} is needed", {"allowed": allowed})
        return self


class PoolPlan(View):
    """What a PATCH would do."""

    dry_run: Literal[True] = True
    capacity_slots: int
    policy: str
    evicted_slots: int = Field(description="Blocks that would leave the pool")
    evicted_bytes: int


class WaitQuery(Query):
    wait: Annotated[float, Field(ge=0, le=30, description="Seconds to wait for the end before answering 202")] = 0.1


class EvictBody(Body):
    """Exactly one of `slots`, `bytes` and `idle_seconds`. The coldest blocks go first."""

    slots: Count | None = Field(None, examples=[100])
    num_bytes: Count | None = Field(None, alias="bytes")
    idle_seconds: Seconds | None = None
    dry_run: bool = False

    @model_validator(mode="after")
    def _has_one_selector(self) -> Self:
        require_one(self, "slots", "num_bytes", "idle_seconds")
        return self


class PurgeBody(Body):
    """Exactly one selector. `all`, `keys` and `key_prefixes` take pinned and leased blocks, too; the others
    only what eviction may take."""

    everything: OnlyTrue | None = Field(None, alias="all", examples=[True])
    keys: KeyList | None = None
    key_prefixes: KeyList | None = None
    idle_seconds: Seconds | None = None
    age_seconds: Seconds | None = None
    slots: Count | None = None
    num_bytes: Count | None = Field(None, alias="bytes")
    dry_run: bool = False

    @model_validator(mode="after")
    def _has_one_selector(self) -> Self:
        selectors = ("everything", "keys", "key_prefixes", "idle_seconds", "age_seconds", "slots", "num_bytes")
        require_one(self, *selectors)
        return self


class RemovedView(View):
    """What was removed, or in a dry run would be. Bytes are of one rank."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"evicted_slots": 100, "evicted_bytes": 209715200, "dry_run": False}]}
    )

    evicted_slots: int
    evicted_bytes: int
    dry_run: bool


class PinBody(Body):
    """Keep these blocks from eviction, for `ttl_seconds` or (null) until they are unpinned."""

    keys: KeyList
    ttl_seconds: PositiveSeconds | None = Field(None, examples=[600.0])


class UnpinBody(Body):
    """Exactly one of `keys` and `all`."""

    keys: KeyList | None = None
    everything: OnlyTrue | None = Field(None, alias="all")

    @model_validator(mode="after")
    def _has_one_selector(self) -> Self:
        require_one(self, "keys", "everything")
        return self


class PinView(View):
    """`changed`: blocks whose pin is new or gone; `missing`: keys that are not in the pool."""

    changed: int
    missing: int


class RetryView(View):
    """`pin_attempt` grows with each retry; ranks see it with their next report."""

    pin_attempt: int
