"""Counters of the last hour, sampled."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from kvstow_api.views.base import View

NOW_SECONDS = 10.0
"""The period that current figures cover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView(View):
    """Counters at one moment: they only grow, so a rate is the difference of two samples. `evicted_blocks` made room
    for others; `dropped_blocks` were offered and not stored. `load_bytes`, `store_bytes` and slots are of one
    rank, `pinned_bytes` of all."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {
            "examples": [
                {
                    "time": "2026-11-02T09:30:00Z",
                    "query_blocks": 5000,
                    "hit_blocks": 3000,
                    "stored_blocks": 2000,
                    "dropped_blocks": 0,
                    "evicted_blocks": 100,
                    "load_bytes": 6291456000,
                    "store_bytes": 4194304000,
                    "used_slots": 1900,
                    "usable_slots": 4096,
                    "pinned_bytes": 17179869184,
                }
            ]
        }
    }

    time: datetime
    query_blocks: int
    hit_blocks: int
    stored_blocks: int
    dropped_blocks: int
    evicted_blocks: int
    load_bytes: int
    store_bytes: int
    used_slots: int
    usable_slots: int
    pinned_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NowView(View):
    """What the counters do now: in the last `seconds`, at most 10.

    `hit_ratio`: blocks found of the blocks looked up, null where none were. Bytes per second are of one rank. Blocks
    per second: `stored`; `evicted` to make room for others, so not those that an operator, a purge, a resize or a
    failure has removed; `dropped`, which were offered and not stored (outcomes `dropped_...`). `used_ratio`: usable
    slots that are not free. `pinned_bytes` is of all ranks. Rates are null until there are two samples."""

    seconds: float
    hit_ratio: float | None
    load_bytes_per_second: float | None
    store_bytes_per_second: float | None
    stored_blocks_per_second: float | None
    evicted_blocks_per_second: float | None
    dropped_blocks_per_second: float | None
    used_ratio: float | None
    pinned_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView(View):
    """Oldest first, `interval_seconds` apart."""

    interval_seconds: float
    now: NowView
    items: list[SampleView]
