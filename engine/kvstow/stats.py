"""The engine's counters, each listed once. The engine counts in an instance of these classes, and `EngineStats` is a
copy of it, which the admin API serves. Each counter also says here how Prometheus sees it. Times are in seconds."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, get_args

from kvstow.messages import Direction

EngineState = Literal["starting", "pinning", "ready", "degraded", "draining", "stopped"]
SlotState = Literal["free", "filling", "cached", "leased", "quarantined"]

SLOT_STATES: tuple[SlotState, ...] = get_args(SlotState)

DIRECTIONS: tuple[Direction, ...] = ("load", "store")
LOOKUP_RESULTS = ("full", "partial", "miss")
MISS_REASONS = ("absent", "not_ready", "bypassed", "draining", "load_failed", "too_many_leases")
FALLBACK_REASONS = MISS_REASONS[1:]
STORE_OUTCOMES = (
    "stored",
    "skipped_already_cached",
    "skipped_in_flight",
    "skipped_duplicate",
    "skipped_bypass",
    "deferred",
    "dropped_cpu_full",
    "dropped_not_ready",
    "dropped_draining",
    "dropped_purged",
    "failed",
)
EVICTION_REASONS = ("capacity", "operator", "purge", "resize", "load_failed", "rank_restart")
LOAD_CHOICES = (
    "layer_alone",
    "layer_budget",
    "layer_trial",
    "layer_setting",
    "async_budget",
    "async_burst",
    "async_whole_prompt",
    "async_rate",
    "async_trial",
    "async_no_room",
    "async_setting",
    "async_engine",
    "async_rank",
)
"""Which way a load went, and why: by layer, within the step that computes with it, or before that step (async)."""
HINTS_IGNORED = ("malformed", "unknown", "invalid", "rate")
"""Why hints of a request were ignored: they are not an object; one has an unknown name, or a value that it cannot have;
or an engine sent too many within a second."""
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
_SIZES = tuple(float(1 << exponent) for exponent in range(16, 33, 2))  # bytes: 64 KiB to 4 GiB
_LOOKUP_SECONDS = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 0.1, 1.0)
_AGE_SECONDS = (0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)


@dataclass(slots=True)
class Histogram:
    """`counts[i]` observations are at most `bounds[i]` and above `bounds[i - 1]`; the last count is of those above all
    bounds. Not locked: its owner observes and copies under its own lock."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.count += 1

    def copy(self) -> Histogram:
        return Histogram(self.bounds, self.counts.copy(), self.sum, self.count)


class Exposed(NamedTuple):
    """How Prometheus sees the counter that is annotated with it: as `kvstow_NAME`, with `text` as its help. `label` is
    the label for the keys of a counter that is a dict."""

    name: str
    text: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """How many slots are in each state. They add up to `usable`. A lease or a load holds the `leased` ones."""

    free: int
    filling: int
    cached: int
    leased: int
    quarantined: int

    @property
    def usable(self) -> int:
        return self.free + self.filling + self.cached + self.leased + self.quarantined


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The slots of one rank; every rank has the same number. If their sizes differ among the ranks, `slot_bytes` is the
    largest size."""

    name: str
    capacity_slots: int
    usable_slots: int
    slot_bytes: int
    policy: str
    leases: int
    slots: SlotCounts


@dataclass(frozen=True, slots=True)
class PendingTransfers:
    """Ops that some rank has not finished. Bytes are those of one rank, the one with the largest slots."""

    loads: int
    stores: int
    load_blocks: int
    store_blocks: int
    load_bytes: int
    store_bytes: int
    oldest_seconds: float
    stuck: int


@dataclass(slots=True)
class DirectionStats:
    """Ops of one direction that ended. All figures but `error` count only ops that succeeded. Blocks and bytes are
    those of one rank, the one with the largest slots, and times are those of the slowest rank."""

    ok: int = 0
    error: int = 0
    blocks: Annotated[int, Exposed("transfer_blocks", "Blocks transferred")] = 0
    bytes: Annotated[int, Exposed("transfer_bytes", "Bytes transferred on one rank")] = 0
    seconds: Annotated[Histogram, Exposed("transfer_duration_seconds", "Duration of the copy on the slowest rank")] = (
        field(default_factory=partial(Histogram, _SECONDS))
    )
    size_bytes: Annotated[Histogram, Exposed("transfer_size_bytes", "Bytes of an op on one rank")] = field(
        default_factory=partial(Histogram, _SIZES)
    )
    queue_seconds: Annotated[
        Histogram, Exposed("transfer_queue_wait_seconds", "Time in the queue of the slowest rank")
    ] = field(default_factory=partial(Histogram, _SECONDS))

    def count_success(self, blocks: int, num_bytes: int, seconds: float, queue_seconds: float) -> None:
        """Count an op that succeeded on every rank. The times are those of the slowest rank."""
        self.ok += 1
        self.blocks += blocks
        self.bytes += num_bytes
        self.seconds.observe(seconds)
        self.size_bytes.observe(float(num_bytes))
        self.queue_seconds.observe(queue_seconds)


@dataclass(slots=True)
class TransferStats:
    pending: PendingTransfers = PendingTransfers(0, 0, 0, 0, 0, 0, 0.0, 0)
    load: DirectionStats = field(default_factory=DirectionStats)
    store: DirectionStats = field(default_factory=DirectionStats)
    choices: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOAD_CHOICES, 0))
    """Loads that began, by `LOAD_CHOICES`."""

    def of(self, direction: Direction) -> DirectionStats:
        return self.load if direction == "load" else self.store


@dataclass(slots=True)
class LookupStats:
    """What lookups have found. `results` counts lookups (full, partial, miss), and the other figures count blocks.
    `hit_ratio` is null before the first lookup."""

    results: Annotated[dict[str, int], Exposed("lookups", "Lookups by result", "result")] = field(
        default_factory=lambda: dict.fromkeys(LOOKUP_RESULTS, 0)
    )
    query_blocks: int = 0
    hit_blocks: int = 0
    hit_ratio: float | None = None
    miss_blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISS_REASONS, 0))
    seconds: Annotated[Histogram, Exposed("lookup_duration_seconds", "Duration of an index lookup")] = field(
        default_factory=partial(Histogram, _LOOKUP_SECONDS)
    )


@dataclass(slots=True)
class PrefillStats:
    """What hits have saved the engines of a pool. Seconds are those of an engine's steps, which all of its ranks spend.
    Counting begins when an engine has computed enough prompts to know what they cost. Then what its hits have brought
    before is counted, too.

    `hit_tokens`: tokens that loads have brought. `hit_seconds`: how long computing them would have taken, by an
    estimate. `load_wait_seconds`: the time in which engines computed nothing, or less, because they waited for loads.
    `seconds_saved`: `hit_seconds` less `load_wait_seconds`, as a counter that never falls. `loads_not_made`: hits that
    were computed, because loading them would have taken longer.
    """

    seconds_saved: Annotated[
        float,
        Exposed(
            "prefill_seconds_saved",
            "Estimated time of the engines' steps to compute what loads brought, less the time that they waited for "
            "loads",
        ),
    ] = 0.0
    hit_seconds: float = 0.0
    hit_tokens: Annotated[
        int, Exposed("prefill_tokens_saved", "Tokens that loads brought, as far as prefill_seconds_saved has them")
    ] = 0
    load_wait_seconds: Annotated[
        float, Exposed("load_wait_seconds", "Time in which engines computed less because they waited for loads")
    ] = 0.0

    loads_not_made: Annotated[
        int, Exposed("loads_not_made", "Loads that were not made because computing takes less time")
    ] = 0

    def count(self, *, tokens: int, seconds: float, waited: float, not_made: int = 0) -> None:
        self.loads_not_made += not_made
        self.hit_tokens += tokens
        self.hit_seconds += seconds
        self.load_wait_seconds += waited
        self.seconds_saved = max(self.seconds_saved, self.hit_seconds - self.load_wait_seconds)


@dataclass(slots=True)
class FaultStats:
    """What went wrong: errors by code, messages of ranks that were ignored, and ranks that restarted without their
    memory."""

    errors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ERRORS, 0))
    stale_completions: Annotated[int, Exposed("stale_completions", "Completions of ops that had already ended")] = 0
    duplicate_completions: Annotated[int, Exposed("duplicate_completions", "Completions received twice")] = 0
    stale_reports: Annotated[int, Exposed("stale_reports", "Reports that arrived after a newer one")] = 0
    rank_restarts: Annotated[int, Exposed("rank_restarts", "Ranks that restarted without their memory")] = 0


@dataclass(slots=True)
class AgeStats:
    """Ages of one block in 61, in seconds. `lifetime`: from the store of a block to its eviction for capacity. `idle`:
    from its last use to that eviction. `reuse_gap`: from one use to the next lookup that finds the block."""

    lifetime: Annotated[
        Histogram,
        Exposed("block_lifetime_seconds", "Age of blocks that were evicted for capacity, for one block in 61"),
    ] = field(default_factory=partial(Histogram, _AGE_SECONDS))
    idle: Annotated[
        Histogram,
        Exposed(
            "block_idle_before_evict_seconds",
            "Time since the last use of blocks that were evicted for capacity, for one block in 61",
        ),
    ] = field(default_factory=partial(Histogram, _AGE_SECONDS))
    reuse_gap: Annotated[
        Histogram,
        Exposed(
            "block_reuse_gap_seconds", "Time since the last use of blocks that a lookup found, for one block in 61"
        ),
    ] = field(default_factory=partial(Histogram, _AGE_SECONDS))


@dataclass(slots=True)
class Counters:
    """Counters since the engine was made. They only grow, and all labels exist from the start. They are plain numbers
    under the engine's lock, because counting then takes 50 ns, and a Counter.inc of prometheus_client takes 1.4 us.

    `stores`: the outcomes of blocks that were offered. Each offer counts, so a block that was dropped, offered again
    and stored counts twice.
    """

    transfers: TransferStats = field(default_factory=TransferStats)
    lookups: LookupStats = field(default_factory=LookupStats)
    stores: Annotated[dict[str, int], Exposed("store_blocks", "Blocks offered to the pool, by outcome", "outcome")] = (
        field(default_factory=lambda: dict.fromkeys(STORE_OUTCOMES, 0))
    )
    evictions: Annotated[dict[str, int], Exposed("evicted_blocks", "Evicted blocks by reason", "reason")] = field(
        default_factory=lambda: dict.fromkeys(EVICTION_REASONS, 0)
    )
    prefill: PrefillStats = field(default_factory=PrefillStats)
    faults: FaultStats = field(default_factory=FaultStats)
    ages: AgeStats = field(default_factory=AgeStats)
    fallbacks: Annotated[
        dict[str, int],
        Exposed("fallbacks", "Lookups and loads that missed blocks for another reason than their absence", "reason"),
    ] = field(default_factory=lambda: dict.fromkeys(FALLBACK_REASONS, 0))
    allocation_failures: Annotated[
        int, Exposed("allocation_failures", "Stores that did not find room for all their blocks")
    ] = 0
    hints_ignored: Annotated[
        dict[str, int], Exposed("hints_ignored", "Requests with a hint that was ignored, by reason", "reason")
    ] = field(default_factory=lambda: dict.fromkeys(HINTS_IGNORED, 0))

    def count_lookup(self, queried: int, hits: int, refusal: str | None) -> None:
        lookups = self.lookups
        lookups.results["miss" if not hits else "partial" if hits < queried else "full"] += 1
        lookups.query_blocks += queried
        lookups.hit_blocks += hits
        lookups.miss_blocks[refusal or "absent"] += queried - hits
        if refusal and hits < queried:
            self.fallbacks[refusal] += 1

    def snapshot(
        self, state: EngineState, pool: PoolStats, pending: PendingTransfers, block_tokens: int | None
    ) -> EngineStats:
        """A copy of all counters, with the values given. O(counters)."""
        counters = [_copied(getattr(self, name)) for name in Counters.__slots__]
        stats = EngineStats(*counters, state=state, pool=pool, block_tokens=block_tokens)
        stats.transfers.pending = pending
        if stats.lookups.query_blocks:
            stats.lookups.hit_ratio = stats.lookups.hit_blocks / stats.lookups.query_blocks
        return stats


@dataclass(slots=True, kw_only=True)
class EngineStats(Counters):
    """A consistent copy of the counters, with the state of the pool at that moment. `block_tokens`: how many tokens a
    block has; None if that is unknown."""

    state: EngineState
    pool: PoolStats
    block_tokens: int | None

    @property
    def evicted_for_capacity(self) -> int:
        """Blocks that gave their slots to others. This is what "evicted" means wherever no reason is named."""
        return self.evictions["capacity"]

    @property
    def dropped_blocks(self) -> int:
        """Blocks that were offered and dropped, for any reason. This is what "dropped" means wherever none is named."""
        return sum(count for outcome, count in self.stores.items() if outcome.startswith("dropped_"))


def _copied(value: Any) -> Any:
    if isinstance(value, (dict, Histogram)):
        return value.copy()
    if isinstance(value, (DirectionStats, TransferStats, LookupStats, PrefillStats, FaultStats, AgeStats)):
        return type(value)(*[_copied(getattr(value, name)) for name in value.__slots__])
    return value
