"""Counters of the engine, by section."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from kvstow.stats import EngineState, EngineStats, HistogramSnapshot
from kvstow_api.schemas.base import Query, View
from kvstow_api.schemas.pools import SlotsView
from kvstow_api.schemas.transfers import PendingView

Section = Literal["pool", "transfers", "lookups", "stores", "evictions", "faults"]
SECTIONS: tuple[str, ...] = get_args(Section)


class StatsQuery(Query):
    section: Annotated[str, Field(description=f"Any of {', '.join(SECTIONS)}, separated by commas; all if empty")] = ""

    @field_validator("section")
    @classmethod
    def _names_sections(cls, value: str) -> str:
        unknown = sorted(set(filter(None, value.split(","))) - set(SECTIONS))
        if unknown:
            raise PydanticCustomError(
                "section",
                "there is no section {unknown}; there are: {allowed}",
                {"unknown": ", ".join(unknown), "allowed": ", ".join(SECTIONS)},
            )
        return value

    @property
    def sections(self) -> frozenset[str]:
        return frozenset(filter(None, self.section.split(","))) or frozenset(SECTIONS)


class HistogramView(View):
    """`counts[i]` lie at or below `bounds[i]` and above the bound before; the last are above all bounds."""

    bounds: list[float]
    counts: list[int]
    sum: float
    count: int

    @classmethod
    def of(cls, snapshot: HistogramSnapshot) -> Self:
        counts = list(snapshot.counts)
        return cls(bounds=list(snapshot.bounds), counts=counts, sum=snapshot.total, count=sum(counts))


class PoolStats(View):
    capacity_slots: int
    usable_slots: int
    slot_bytes: int
    policy: str
    leases: int
    slots: SlotsView


class DirectionStats(View):
    """Transfers of one direction. Blocks and bytes are of one rank, of those that succeeded."""

    ok: int
    error: int
    blocks: int
    bytes: int
    seconds: HistogramView
    size_bytes: HistogramView
    queue_seconds: HistogramView


class TransferStats(View):
    pending: PendingView
    load: DirectionStats
    store: DirectionStats


class LookupStats(View):
    """`results` counts look-ups, the others blocks; `hit_ratio` is null before the first look-up."""

    results: dict[str, int]
    query_blocks: int
    hit_blocks: int
    hit_ratio: float | None
    miss_blocks: dict[str, int]
    seconds: HistogramView


class FaultStats(View):
    errors: dict[str, int]
    stale_completions: int
    duplicate_completions: int
    stale_reports: int
    rank_restarts: int


class StatsView(View):
    """Counters since the engine was made. Sections that were not asked for are absent."""

    state: EngineState
    pool: PoolStats | None = None
    transfers: TransferStats | None = None
    lookups: LookupStats | None = None
    stores: dict[str, int] | None = Field(None, description="Blocks by outcome")
    evictions: dict[str, int] | None = Field(None, description="Blocks by reason")
    faults: FaultStats | None = None

    @classmethod
    def of(cls, stats: EngineStats, sections: frozenset[str]) -> StatsView:
        makers: dict[str, Callable[[], object]] = {
            "pool": lambda: PoolStats.model_validate(stats),
            "transfers": lambda: _transfers(stats),
            "lookups": lambda: _lookups(stats),
            "stores": lambda: dict(stats.store_blocks),
            "evictions": lambda: dict(stats.evicted_blocks),
            "faults": lambda: _faults(stats),
        }
        return cls.model_validate(
            {"state": stats.state, **{name: make() for name, make in makers.items() if name in sections}}
        )


def _transfers(stats: EngineStats) -> TransferStats:
    return TransferStats(
        pending=PendingView.model_validate(stats.pending),
        load=_direction(stats, "load"),
        store=_direction(stats, "store"),
    )


def _direction(stats: EngineStats, direction: Literal["load", "store"]) -> DirectionStats:
    return DirectionStats(
        ok=stats.transfers[direction, "ok"],
        error=stats.transfers[direction, "error"],
        blocks=stats.transfer_blocks[direction],
        bytes=stats.transfer_bytes[direction],
        seconds=HistogramView.of(stats.transfer_seconds[direction]),
        size_bytes=HistogramView.of(stats.transfer_size[direction]),
        queue_seconds=HistogramView.of(stats.queue_seconds[direction]),
    )


def _lookups(stats: EngineStats) -> LookupStats:
    return LookupStats(
        results=dict(stats.lookups),
        query_blocks=stats.query_blocks,
        hit_blocks=stats.hit_blocks,
        hit_ratio=stats.hit_blocks / stats.query_blocks if stats.query_blocks else None,
        miss_blocks=dict(stats.miss_blocks),
        seconds=HistogramView.of(stats.lookup_seconds),
    )


def _faults(stats: EngineStats) -> FaultStats:
    return FaultStats(
        errors=dict(stats.errors),
        stale_completions=stats.stale_completions,
        duplicate_completions=stats.duplicate_completions,
        stale_reports=stats.stale_reports,
        rank_restarts=stats.rank_restarts,
    )
