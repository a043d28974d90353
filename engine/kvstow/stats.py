"""What the engine says about itself: frozen snapshots, and the histogram behind some of them.

All times are seconds, all ages are relative to the moment of the snapshot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvstow.messages import Direction, RankState

EngineState = Literal["starting", "pinning", "ready", "degraded", "draining", "stopped"]
SlotState = Literal["free", "filling", "cached", "leased", "protected", "quarantined"]

SLOT_STATES: tuple[SlotState, ...] = ("free", "filling", "cached", "leased", "protected", "quarantined")


class HistogramSnapshot(NamedTuple):
    """`counts[i]` observations lie at or below `bounds[i]` and above `bounds[i - 1]`; the last count is of
    those above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts in fixed buckets. Not locked: its owner observes and snapshots under its own lock."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """How many slots are in which state. They add up to `usable`.

    `leased`: held by a lease or a load and not protected; `protected`: protected by an operator, leased or not.
    """

    free: int
    filling: int
    cached: int
    leased: int
    protected: int
    quarantined: int

    @property
    def usable(self) -> int:
        return self.free + self.filling + self.cached + self.leased + self.protected + self.quarantined


@dataclass(frozen=True, slots=True)
class PendingTransfers:
    """Ops that not every rank has finished. Bytes are of one rank, the one with the largest slots."""

    loads: int
    stores: int
    load_blocks: int
    store_blocks: int
    load_bytes: int
    store_bytes: int
    oldest_seconds: float
    stuck: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One consistent view of the counters, taken in O(1) of the pool's size.

    Counters only grow. Keys of the mappings are fixed from the start. `lookups`: full, partial, miss.
    `miss_blocks`: absent, not_ready, bypassed, draining, load_failed; `fallbacks`: look-ups and loads with blocks that
    were missed for any of these but the first. `store_blocks`: stored, skipped_*, dropped_*, failed, of each time that
    a block was offered: a host may offer one again that was dropped, and it counts as stored then, too.
    `allocation_failures`: stores that did not find room for all their blocks. `evicted_blocks`: by reason. Of one
    block in 61: how long it stayed, how long it was idle when it was evicted for room, and how long it had been idle
    when a look-up found it. `transfers`: (direction, result) with results ok and error.
    `transfer_blocks`, `transfer_bytes`: by direction, of one rank, of ops that succeeded. Where slots differ in size
    among the ranks, `slot_bytes` and all bytes are those of the rank with the largest.
    """

    state: EngineState
    slot_bytes: int
    block_tokens: int | None
    capacity_slots: int
    usable_slots: int
    policy: str
    slots: SlotCounts
    leases: int
    pending: PendingTransfers
    lookups: Mapping[str, int]
    query_blocks: int
    hit_blocks: int
    miss_blocks: Mapping[str, int]
    fallbacks: Mapping[str, int]
    store_blocks: Mapping[str, int]
    allocation_failures: int
    evicted_blocks: Mapping[str, int]
    transfers: Mapping[tuple[Direction, str], int]
    transfer_blocks: Mapping[Direction, int]
    transfer_bytes: Mapping[Direction, int]
    transfer_seconds: Mapping[Direction, HistogramSnapshot]
    transfer_size: Mapping[Direction, HistogramSnapshot]
    queue_seconds: Mapping[Direction, HistogramSnapshot]
    lookup_seconds: HistogramSnapshot
    lifetime_seconds: HistogramSnapshot
    idle_seconds: HistogramSnapshot
    reuse_gap_seconds: HistogramSnapshot
    stale_completions: int
    duplicate_completions: int
    stale_reports: int
    rank_restarts: int
    last_event: int
    errors: Mapping[str, int]

    @property
    def evicted_for_room(self) -> int:
        """Blocks that gave their slots to others: what "evicted" means wherever no reason is named."""
        return self.evicted_blocks["capacity"]

    @property
    def dropped_blocks(self) -> int:
        """Blocks that were to be stored and were not, for any reason but a failure: what "dropped" means."""
        return sum(count for outcome, count in self.store_blocks.items() if outcome.startswith("dropped_"))


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What is known of one rank; `boot_id` is None until it has reported."""

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
    pin_failures: Mapping[str, int]
    numa_bytes: Mapping[str, int]
    last_report_age_seconds: float | None


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether traffic can flow, and how far each rank is."""

    state: EngineState
    reason: str
    usable_slots: int
    capacity_slots: int
    ranks: tuple[RankStatus, ...]


@dataclass(frozen=True, slots=True)
class TransferView:
    """One op in flight. `state`: queued (nothing heard yet), running (some rank has reported), stuck, or
    quarantined (a store given up, waiting for the last ranks). `idle_ranks`: those of `pending_ranks` that have nothing
    under way, by their last report; the host has not given them the op, or not collected their completion."""

    op_id: int
    direction: Direction
    state: Literal["queued", "running", "stuck", "quarantined"]
    blocks: int
    bytes: int
    age_seconds: float
    pending_ranks: tuple[int, ...]
    idle_ranks: tuple[int, ...]
    failed: bool
    request_id: str


@dataclass(frozen=True, slots=True)
class BlockView:
    """One slot that holds a visible block."""

    key: bytes
    slot: int
    state: SlotState
    age_seconds: float
    idle_seconds: float
    leases: int
    protection_ttl_seconds: float | None


class BlockPage(NamedTuple):
    """Some blocks in order of their slots; `next_slot` continues the listing, None at its end."""

    blocks: tuple[BlockView, ...]
    next_slot: int | None
