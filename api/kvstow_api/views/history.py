"""Counters of the last hour, sampled."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from kvstow_api.views.base import View


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView(View):
    """Counters at one moment: they only grow, so a rate is the difference of two samples. `load_bytes`, `store_bytes`
    and slots are of one rank, `pinned_bytes` of all."""

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
class HistoryView(View):
    """Oldest first, `interval_seconds` apart."""

    interval_seconds: float
    items: list[SampleView]
