"""Counters of the engine, by section."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from kvstow.messages import Direction
from kvstow.stats import EngineState, EngineStats, HistogramSnapshot
from kvstow_api.views.base import View
from kvstow_api.views.pools import SlotsView
from kvstow_api.views.transfers import PendingView

Section = Literal["pool", "transfers", "lookups", "stores", "evictions", "faults"]
SECTIONS: tuple[Section, ...] = get_args(Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramView(View):
    """`counts[i]` lie at or below `bounds[i]` and above the bound before; the last are above all bounds."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {"examples": [{"bounds": [0.001, 0.01], "counts": [40, 2, 0], "sum": 0.031, "count": 42}]}
    }

    bounds: list[float]
    counts: list[int]
    sum: float
    count: int

    @classmethod
    def made(cls, snapshot: HistogramSnapshot) -> HistogramView:
        counts = list(snapshot.counts)
        return cls(bounds=list(snapshot.bounds), counts=counts, sum=snapshot.total, count=sum(counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats(View):
    capacity_slots: int
    usable_slots: int
    slot_bytes: int
    policy: str
    leases: int
    slots: SlotsView


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectionStats(View):
    """Transfers of one direction. Blocks and bytes are of one rank, of those that succeeded."""

    ok: int
    error: int
    blocks: int
    bytes: int
    seconds: HistogramView
    size_bytes: HistogramView
    queue_seconds: HistogramView


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats(View):
    pending: PendingView
    load: DirectionStats
    store: DirectionStats


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupStats(View):
    """`results` counts look-ups, the others blocks; `hit_ratio` is null before the first look-up."""

    results: dict[str, int]
    query_blocks: int
    hit_blocks: int
    hit_ratio: float | None
    miss_blocks: dict[str, int]
    seconds: HistogramView


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStats(View):
    errors: dict[str, int]
    stale_completions: int
    duplicate_completions: int
    stale_reports: int
    rank_restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsView(View):
    """Counters since the engine was made. Sections that were not asked for are null. `stores` counts blocks by
    outcome, `evictions` by reason."""

    state: EngineState
    pool: PoolStats | None = None
    transfers: TransferStats | None = None
    lookups: LookupStats | None = None
    stores: dict[str, int] | None = None
    evictions: dict[str, int] | None = None
    faults: FaultStats | None = None

    @classmethod
    def made(cls, stats: EngineStats, sections: Collection[str]) -> StatsView:
        makers: dict[str, Callable[[], Any]] = {
            "pool": lambda: PoolStats.of(stats),
            "transfers": lambda: _transfers(stats),
            "lookups": lambda: _lookups(stats),
            "stores": lambda: dict(stats.store_blocks),
            "evictions": lambda: dict(stats.evicted_blocks),
            "faults": lambda: FaultStats.of(stats),
        }
        return cls(state=stats.state, **{name: make() for name, make in makers.items() if name in sections})


def _transfers(stats: EngineStats) -> TransferStats:
    return TransferStats(
        pending=PendingView.of(stats.pending),
        load=_direction(stats, "load"),
        store=_direction(stats, "store"),
    )


def _direction(stats: EngineStats, direction: Direction) -> DirectionStats:
    return DirectionStats(
        ok=stats.transfers[direction, "ok"],
        error=stats.transfers[direction, "error"],
        blocks=stats.transfer_blocks[direction],
        bytes=stats.transfer_bytes[direction],
        seconds=HistogramView.made(stats.transfer_seconds[direction]),
        size_bytes=HistogramView.made(stats.transfer_size[direction]),
        queue_seconds=HistogramView.made(stats.queue_seconds[direction]),
    )


def _lookups(stats: EngineStats) -> LookupStats:
    return LookupStats(
        results=dict(stats.lookups),
        query_blocks=stats.query_blocks,
        hit_blocks=stats.hit_blocks,
        hit_ratio=stats.hit_blocks / stats.query_blocks if stats.query_blocks else None,
        miss_blocks=dict(stats.miss_blocks),
        seconds=HistogramView.made(stats.lookup_seconds),
    )
