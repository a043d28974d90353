"""The engine's counters, and the frozen snapshot of them that the admin API serves.

Times are in seconds, ages are relative to the moment of the snapshot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvstow.messages import Direction

EngineState = Literal["starting", "pinning", "ready", "degraded", "draining", "stopped"]
SlotState = Literal["free", "filling", "cached", "leased", "protected", "quarantined"]

SLOT_STATES: tuple[SlotState, ...] = ("free", "filling", "cached", "leased", "protected", "quarantined")

DIRECTIONS: tuple[Direction, ...] = ("load", "store")
LOOKUP_RESULTS = ("full", "partial", "miss")
MISS_REASONS = ("absent", "not_ready", "bypassed", "draining", "load_failed")
FALLBACK_REASONS = MISS_REASONS[1:]
STORE_OUTCOMES = (
    "stored",
    "skipped_already_cached",
    "skipped_in_flight",
    "skipped_duplicate",
    "skipped_bypass",
    "dropped_cpu_full",
    "dropped_not_ready",
    "dropped_draining",
    "dropped_purged",
    "failed",
)
EVICTION_REASONS = ("capacity", "operator", "purge", "resize", "load_failed", "rank_restart")
ERRORS = (
    "store_failed",
    "load_failed",
    "transfer_stuck",
    "rank_restarted",
    "rank_report",
    "integrity",
    "admin_server",
    "host",
    "log_line_dropped",
)

_SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
_SIZES = tuple(float(1 << exponent) for exponent in range(16, 33, 2))  # 64 KiB to 4 GiB
_LOOKUP_SECONDS = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 0.1, 1.0)
_AGE_SECONDS = (0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """`counts[i]` observations are at most `bounds[i]` and above `bounds[i - 1]`; the last count is of those above all
    bounds. `sum` and `count` are of all observations."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    count: int


class Histogram:
    """Counts in fixed buckets. Not locked: its owner observes and takes snapshots under its own lock."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._sum, sum(self._counts))


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Slots by state. They add up to `usable`.

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
class PoolStats:
    """Slots are of one rank; every rank has the same. Where slots differ in size among the ranks, `slot_bytes` is the
    largest size."""

    capacity_slots: int
    usable_slots: int
    slot_bytes: int
    policy: str
    leases: int
    slots: SlotCounts


@dataclass(frozen=True, slots=True)
class PendingTransfers:
    """Ops that some rank has not finished. Bytes are of one rank, the one with the largest slots."""

    loads: int
    stores: int
    load_blocks: int
    store_blocks: int
    load_bytes: int
    store_bytes: int
    oldest_seconds: float
    stuck: int


@dataclass(frozen=True, slots=True)
class DirectionStats:
    """Ops of one direction that ended. Blocks and bytes are of one rank, the one with the largest slots, and of ops
    that succeeded; so are the times, each of the slowest rank."""

    ok: int
    error: int
    blocks: int
    bytes: int
    seconds: HistogramSnapshot
    size_bytes: HistogramSnapshot
    queue_seconds: HistogramSnapshot


@dataclass(frozen=True, slots=True)
class TransferStats:
    pending: PendingTransfers
    load: DirectionStats
    store: DirectionStats

    def of(self, direction: Direction) -> DirectionStats:
        return self.load if direction == "load" else self.store


@dataclass(frozen=True, slots=True)
class LookupStats:
    """`results` counts look-ups (full, partial, miss), the other figures count blocks. `hit_ratio` is null before the
    first look-up."""

    results: Mapping[str, int]
    query_blocks: int
    hit_blocks: int
    hit_ratio: float | None
    miss_blocks: Mapping[str, int]
    seconds: HistogramSnapshot


@dataclass(frozen=True, slots=True)
class FaultStats:
    """What went wrong: errors by code, messages of ranks that were ignored, ranks that restarted without their
    memory."""

    errors: Mapping[str, int]
    stale_completions: int
    duplicate_completions: int
    stale_reports: int
    rank_restarts: int


@dataclass(frozen=True, slots=True)
class AgeStats:
    """Of one block in 61, in seconds. `lifetime`: from the store of a block to its eviction for capacity; `idle`: from
    its last use to that eviction; `reuse_gap`: from one use to the next look-up that finds the block."""

    lifetime: HistogramSnapshot
    idle: HistogramSnapshot
    reuse_gap: HistogramSnapshot


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One consistent view of the counters, taken in O(1) of the pool's size.

    Counters only grow. Keys of the mappings are fixed from the start. `stores`: blocks by outcome (stored, skipped_*,
    dropped_*, failed), each time that a block was offered: a host may offer a dropped one again, and it counts as
    stored then, too. `evictions`: blocks by reason. `fallbacks`: look-ups and loads that missed blocks for any reason
    but their absence. `allocation_failures`: stores that did not find room for all their blocks. `block_tokens`: None
    while the number of tokens in a block is unknown.
    """

    state: EngineState
    pool: PoolStats
    transfers: TransferStats
    lookups: LookupStats
    stores: Mapping[str, int]
    evictions: Mapping[str, int]
    faults: FaultStats
    ages: AgeStats
    fallbacks: Mapping[str, int]
    allocation_failures: int
    block_tokens: int | None

    @property
    def evicted_for_capacity(self) -> int:
        """Blocks that gave their slots to others: what "evicted" means wherever no reason is named."""
        return self.evictions["capacity"]

    @property
    def dropped_blocks(self) -> int:
        """Blocks that were offered and not stored, for any reason but a failure: what "dropped" means."""
        return sum(count for outcome, count in self.stores.items() if outcome.startswith("dropped_"))


class Counters:
    """The live counters. Plain numbers, changed and read under the engine's lock (a list item costs 50 ns, a
    Counter.inc of prometheus_client 1.4 us). All labels exist from the start."""

    def __init__(self) -> None:
        self.lookups = dict.fromkeys(LOOKUP_RESULTS, 0)
        self.query_blocks = 0
        self.hit_blocks = 0
        self.miss_blocks = dict.fromkeys(MISS_REASONS, 0)
        self.lookup_seconds = Histogram(_LOOKUP_SECONDS)
        self.fallbacks = dict.fromkeys(FALLBACK_REASONS, 0)
        self.stores = dict.fromkeys(STORE_OUTCOMES, 0)
        self.allocation_failures = 0
        self.evictions = dict.fromkeys(EVICTION_REASONS, 0)
        self.lifetime = Histogram(_AGE_SECONDS)
        self.idle = Histogram(_AGE_SECONDS)
        self.reuse_gap = Histogram(_AGE_SECONDS)
        self.transfers = {direction: TransferCounters() for direction in DIRECTIONS}
        self.errors = dict.fromkeys(ERRORS, 0)
        self.stale_completions = 0
        self.duplicate_completions = 0
        self.stale_reports = 0
        self.rank_restarts = 0

    def count_lookup(self, queried: int, hits: int, refusal: str | None) -> None:
        self.lookups["miss" if not hits else "partial" if hits < queried else "full"] += 1
        self.query_blocks += queried
        self.hit_blocks += hits
        self.miss_blocks[refusal or "absent"] += queried - hits
        if refusal and hits < queried:
            self.fallbacks[refusal] += 1

    def snapshot(
        self, state: EngineState, pool: PoolStats, pending: PendingTransfers, block_tokens: int | None
    ) -> EngineStats:
        return EngineStats(
            state=state,
            pool=pool,
            transfers=TransferStats(
                pending=pending,
                load=self.transfers["load"].snapshot(pool.slot_bytes),
                store=self.transfers["store"].snapshot(pool.slot_bytes),
            ),
            lookups=LookupStats(
                results=dict(self.lookups),
                query_blocks=self.query_blocks,
                hit_blocks=self.hit_blocks,
                hit_ratio=self.hit_blocks / self.query_blocks if self.query_blocks else None,
                miss_blocks=dict(self.miss_blocks),
                seconds=self.lookup_seconds.snapshot(),
            ),
            stores=dict(self.stores),
            evictions=dict(self.evictions),
            faults=FaultStats(
                errors=dict(self.errors),
                stale_completions=self.stale_completions,
                duplicate_completions=self.duplicate_completions,
                stale_reports=self.stale_reports,
                rank_restarts=self.rank_restarts,
            ),
            ages=AgeStats(self.lifetime.snapshot(), self.idle.snapshot(), self.reuse_gap.snapshot()),
            fallbacks=dict(self.fallbacks),
            allocation_failures=self.allocation_failures,
            block_tokens=block_tokens,
        )


class TransferCounters:
    """Ops of one direction that ended. Part of `Counters`."""

    def __init__(self) -> None:
        self.ok = self.error = self.blocks = 0
        self.seconds, self.queue_seconds = Histogram(_SECONDS), Histogram(_SECONDS)
        self.size_bytes = Histogram(_SIZES)

    def count_success(self, blocks: int, num_bytes: int, seconds: float, queue_seconds: float) -> None:
        """A transfer succeeded on every rank; the times are those of the slowest."""
        self.ok += 1
        self.blocks += blocks
        self.seconds.observe(seconds)
        self.size_bytes.observe(float(num_bytes))
        self.queue_seconds.observe(queue_seconds)

    def snapshot(self, slot_bytes: int) -> DirectionStats:
        return DirectionStats(
            ok=self.ok,
            error=self.error,
            blocks=self.blocks,
            bytes=self.blocks * slot_bytes,
            seconds=self.seconds.snapshot(),
            size_bytes=self.size_bytes.snapshot(),
            queue_seconds=self.queue_seconds.snapshot(),
        )
