"""Ranks, and the readiness that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvstow.messages import RankState
from kvstow.stats import EngineState
from kvstow_api.views.base import View

_EXAMPLE = {
    "rank": 0,
    "boot_id": "6f1d2a9c",
    "state": "pinning",
    "slot_bytes": 2097152,
    "pinned_slots": 512,
    "target_slots": 4096,
    "pinned_bytes": 1073741824,
    "target_bytes": 8589934592,
    "pin_rate_bytes_per_second": 2.1e9,
    "pin_elapsed_seconds": 0.5,
    "pin_mode": "mlock",
    "locked_bytes": 1073741824,
    "resident_bytes": 1073741824,
    "chunks_done": 16,
    "chunks_total": 128,
    "chunks_failed": 0,
    "error_reason": None,
    "error": None,
    "notice": None,
    "pending_ops": 3,
    "queued_stores": 1,
    "queued_loads": 0,
    "uncollected_completions": 0,
    "stale_desired_states": 0,
    "store_bytes_total": 50331648,
    "load_bytes_total": 0,
    "store_busy_seconds": 0.02,
    "load_busy_seconds": 0.0,
    "pin_failures": {},
    "numa_bytes": {"0": 1073741824},
    "last_report_age_seconds": 0.4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView(View):
    """One rank as it last reported; `boot_id` and `last_report_age_seconds` are null before it has.
    `pin_rate_bytes_per_second`: bytes pinned by the current or last growth of its pool, divided by the time that it
    took; null if it has pinned nothing."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"json_schema_extra": {"examples": [_EXAMPLE]}}

    rank: int
    boot_id: str | None
    state: RankState
    slot_bytes: int
    pinned_slots: int
    target_slots: int
    pinned_bytes: int
    target_bytes: int
    pin_rate_bytes_per_second: float | None
    pin_elapsed_seconds: float
    pin_mode: str
    locked_bytes: int
    resident_bytes: int
    chunks_done: int
    chunks_total: int
    chunks_failed: int
    error_reason: str | None
    error: str | None
    notice: str | None
    pending_ops: int
    queued_stores: int
    queued_loads: int
    uncollected_completions: int
    stale_desired_states: int
    store_bytes_total: int
    load_bytes_total: int
    store_busy_seconds: float
    load_busy_seconds: float
    pin_failures: dict[str, int]
    numa_bytes: dict[str, int]
    last_report_age_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksView(View):
    items: list[RankView]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessView(View):
    """Whether traffic can flow, and how far each rank is."""

    state: EngineState
    reason: str
    usable_slots: int
    capacity_slots: int
    ranks: list[RankView]


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredView(View):
    """What the engine wants of a rank."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {
            "examples": [
                {"engine_id": "6f1d2a9c", "capacity_slots": 4096, "paused": False, "pin_attempt": 0, "number": 1}
            ]
        }
    }

    engine_id: str
    capacity_slots: int
    paused: bool
    pin_attempt: int
    number: int
