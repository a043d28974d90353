"""Pools, and what was done with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvstow.stats import EngineStats
from kvstow_api.views.base import View

POOL_NAME = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsView(View):
    """Slots by state; they add up to `usable_slots`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {
            "examples": [{"free": 96, "filling": 8, "cached": 3976, "leased": 16, "protected": 0, "quarantined": 0}]
        }
    }

    free: int
    filling: int
    cached: int
    leased: int
    protected: int
    quarantined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView(View):
    """A pool. Slots and bytes are of one rank; every rank has the same. `etag` names its settings; `block_tokens` is
    null while the number of tokens in a block is unknown."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {
            "examples": [
                {
                    "name": "host",
                    "etag": '"6f1d2a9c-3"',
                    "slot_bytes": 2097152,
                    "block_tokens": 16,
                    "capacity_slots": 4096,
                    "capacity_bytes": 8589934592,
                    "max_capacity_slots": 8192,
                    "max_capacity_bytes": 17179869184,
                    "usable_slots": 4096,
                    "usable_bytes": 8589934592,
                    "slots": {"free": 96, "filling": 8, "cached": 3976, "leased": 16, "protected": 0, "quarantined": 0},
                    "policy": "lru",
                    "pinning_paused": False,
                    "leases": 2,
                    "num_ranks": 2,
                }
            ]
        }
    }

    name: str
    etag: str
    slot_bytes: int
    block_tokens: int | None
    capacity_slots: int
    capacity_bytes: int
    max_capacity_slots: int
    max_capacity_bytes: int
    usable_slots: int
    usable_bytes: int
    slots: SlotsView
    policy: str
    pinning_paused: bool
    leases: int
    num_ranks: int

    @classmethod
    def made(
        cls, stats: EngineStats, *, etag: str, pinning_paused: bool, max_capacity_slots: int, num_ranks: int
    ) -> PoolView:
        return cls(
            name=POOL_NAME,
            etag=etag,
            slot_bytes=stats.slot_bytes,
            block_tokens=stats.block_tokens,
            capacity_slots=stats.capacity_slots,
            capacity_bytes=stats.capacity_slots * stats.slot_bytes,
            max_capacity_slots=max_capacity_slots,
            max_capacity_bytes=max_capacity_slots * stats.slot_bytes,
            usable_slots=stats.usable_slots,
            usable_bytes=stats.usable_slots * stats.slot_bytes,
            slots=SlotsView.of(stats.slots),
            policy=stats.policy,
            pinning_paused=pinning_paused,
            leases=stats.leases,
            num_ranks=num_ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsView(View):
    items: list[PoolView]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView(View):
    """What a change of settings would do."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {
            "examples": [
                {
                    "dry_run": True,
                    "capacity_slots": 2048,
                    "policy": "lru",
                    "pinning_paused": False,
                    "evicted_slots": 1952,
                    "evicted_bytes": 4093640704,
                }
            ]
        }
    }

    dry_run: Literal[True] = True
    capacity_slots: int
    policy: str
    pinning_paused: bool
    evicted_slots: int
    evicted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedView(View):
    """What was removed, or in a dry run would be. Bytes are of one rank."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {"examples": [{"evicted_slots": 100, "evicted_bytes": 209715200, "dry_run": False}]}
    }

    evicted_slots: int
    evicted_bytes: int
    dry_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectionView(View):
    """`changed`: blocks that were protected or unprotected; `missing`: keys that are not in the pool."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"json_schema_extra": {"examples": [{"changed": 3, "missing": 1}]}}

    changed: int
    missing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PinningView(View):
    """What the ranks are told about pinning; they hear it with their next report. `pin_attempt` grows with each
    retry."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {"examples": [{"paused": False, "pin_attempt": 1}]}
    }

    paused: bool
    pin_attempt: int
