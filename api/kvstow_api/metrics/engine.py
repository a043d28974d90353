"""Families of the engine: pool, pinning, ranks, transfers, look-ups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import get_args

from prometheus_client import Metric

from kvstow.errors import PinError
from kvstow.stats import DIRECTIONS, DirectionStats, EngineState, EngineStats
from kvstow.status import RankStatus, Readiness
from kvstow_api.metrics.families import Row, by_label, counter, gauge, histogram, scalar
from kvstow_api.views import POOL_NAME

SOURCE = "host"

_PIN_FAILURES = (*PinError.PIN_FAILURES, "internal")
_COMPONENTS = {"admin_server": "admin_server", "rank_report": "connector"}
"""What has failed, by the code of an error that is not the engine's own."""
_STATES: tuple[EngineState, ...] = get_args(EngineState)


def engine_families(stats: EngineStats, readiness: Readiness, now: float) -> Iterator[Metric]:
    """All of the engine. `now`: seconds since the epoch."""
    yield from _pool(stats)
    yield from _ranks(readiness, now)
    yield from _pinning(readiness.ranks)
    yield from _pending(stats)
    yield from _transfers(stats)
    yield from _kept_by_ranks(readiness.ranks)
    yield from _ages(stats)
    yield from _lookups(stats)
    yield from _faults(stats)


def _pool(stats: EngineStats) -> Iterator[Metric]:
    pool, evicted = stats.pool, stats.evictions
    slots = asdict(pool.slots)
    evicted_bytes = {reason: count * pool.slot_bytes for reason, count in evicted.items()}
    yield gauge(
        "kvstow_pool_blocks", "Usable slots of one rank by state", ["pool", "state"], by_label(slots, POOL_NAME)
    )
    yield gauge(
        "kvstow_pool_capacity_blocks",
        "Slots wanted on every rank",
        ["pool"],
        [((POOL_NAME,), pool.capacity_slots)],
    )
    yield gauge(
        "kvstow_pool_usable_blocks", "Slots pinned on every rank", ["pool"], [((POOL_NAME,), pool.usable_slots)]
    )
    yield gauge("kvstow_pool_block_bytes", "Bytes of a slot on one rank", ["pool"], [((POOL_NAME,), pool.slot_bytes)])
    yield gauge("kvstow_leases", "Leases that are out", [], scalar(pool.leases))
    yield counter(
        "kvstow_allocation_failures",
        "Stores that did not find room for all their blocks",
        ["pool"],
        [((POOL_NAME,), stats.allocation_failures)],
    )
    yield counter(
        "kvstow_evicted_blocks", "Blocks removed, by reason", ["pool", "reason"], by_label(evicted, POOL_NAME)
    )
    yield counter(
        "kvstow_evicted_bytes", "Bytes removed on one rank", ["pool", "reason"], by_label(evicted_bytes, POOL_NAME)
    )


def _ranks(readiness: Readiness, now: float) -> Iterator[Metric]:
    ranks = readiness.ranks
    yield gauge(
        "kvstow_state",
        "1 for the state that the engine is in",
        ["state"],
        [((state,), float(state == readiness.state)) for state in _STATES],
    )
    yield gauge(
        "kvstow_rank_heartbeat_timestamp_seconds",
        "When the rank last reported, 0 if never",
        ["rank"],
        [((str(rank.rank),), _heard_at(rank, now)) for rank in ranks],
    )
    yield gauge(
        "kvstow_pool_capacity_bytes",
        "Bytes wanted",
        ["pool", "rank"],
        [((POOL_NAME, str(rank.rank)), readiness.capacity_slots * rank.slot_bytes) for rank in ranks],
    )
    for name, text, attribute in (
        ("kvstow_pool_pinned_bytes", "Bytes that are pinned", "pinned_bytes"),
        ("kvstow_pool_locked_bytes", "Pinned bytes that are locked in memory", "locked_bytes"),
        ("kvstow_pool_resident_bytes", "Bytes that are in memory", "resident_bytes"),
    ):
        yield gauge(name, text, ["pool", "rank"], _per_rank(ranks, attribute))
    yield gauge(
        "kvstow_pool_numa_bytes",
        "Bytes of the pool by the NUMA node that they lie on, where the kernel tells",
        ["pool", "rank", "numa_node"],
        [
            ((POOL_NAME, str(rank.rank), node), num_bytes)
            for rank in ranks
            for node, num_bytes in rank.numa_bytes.items()
        ],
    )
    yield gauge(
        "kvstow_rank_pending_ops",
        "Ops that the rank has not finished",
        ["rank"],
        [((str(rank.rank),), rank.pending_ops) for rank in ranks],
    )
    yield gauge(
        "kvstow_transfer_queue_depth",
        "Ops that wait on the rank for others of their direction",
        ["direction", "rank"],
        _of_directions(ranks, "queued_loads", "queued_stores"),
    )


def _heard_at(rank: RankStatus, now: float) -> float:
    return 0.0 if rank.last_report_age_seconds is None else now - rank.last_report_age_seconds


def _per_rank(ranks: tuple[RankStatus, ...], attribute: str) -> list[Row]:
    return [((POOL_NAME, str(rank.rank)), getattr(rank, attribute)) for rank in ranks]


def _pinning(ranks: tuple[RankStatus, ...]) -> Iterator[Metric]:
    yield gauge(
        "kvstow_pin_progress_ratio",
        "Pinned of the bytes wanted, 0 to 1",
        ["pool", "rank"],
        [((POOL_NAME, str(rank.rank)), _ratio(rank.pinned_bytes, rank.target_bytes)) for rank in ranks],
    )
    yield gauge(
        "kvstow_pin_elapsed_seconds",
        "Time spent on pinning",
        ["pool", "rank"],
        _per_rank(ranks, "pin_elapsed_seconds"),
    )
    yield gauge(
        "kvstow_pin_rate_bytes_per_second",
        "Bytes pinned by the current or last growth of the pool, divided by the time that it took",
        ["pool", "rank"],
        [row for row in _per_rank(ranks, "pin_rate_bytes_per_second") if row[1] is not None],
    )
    yield gauge(
        "kvstow_pin_chunks",
        "Chunks of memory to pin, by state",
        ["pool", "rank", "state"],
        [row for rank in ranks for row in by_label(_chunks(rank), POOL_NAME, str(rank.rank))],
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _chunks(rank: RankStatus) -> Mapping[str, int]:
    pending = max(0, rank.chunks_total - rank.chunks_done - rank.chunks_failed)
    return {"pending": pending, "done": rank.chunks_done, "failed": rank.chunks_failed}


def _pending(stats: EngineStats) -> Iterator[Metric]:
    pending = stats.transfers.pending
    ops = {"load": pending.loads, "store": pending.stores}
    num_bytes = {"load": pending.load_bytes, "store": pending.store_bytes}
    yield gauge("kvstow_transfers_inflight", "Ops that some rank has not finished", ["direction"], by_label(ops))
    yield gauge("kvstow_transfer_inflight_bytes", "Bytes of these ops on one rank", ["direction"], by_label(num_bytes))
    yield gauge("kvstow_transfers_stuck", "Ops older than the transfer timeout", [], scalar(pending.stuck))
    yield gauge("kvstow_transfer_oldest_seconds", "Age of the oldest op", [], scalar(pending.oldest_seconds))


def _transfers(stats: EngineStats) -> Iterator[Metric]:
    transfers: dict[str, DirectionStats] = {direction: stats.transfers.of(direction) for direction in DIRECTIONS}
    ended = {(name, result): getattr(one, result) for name, one in transfers.items() for result in ("ok", "error")}
    blocks = {name: one.blocks for name, one in transfers.items()}
    num_bytes = {name: one.bytes for name, one in transfers.items()}
    yield counter("kvstow_transfers", "Ops that ended, by result", ["direction", "result"], ended.items())
    yield counter("kvstow_transfer_blocks", "Blocks transferred", ["direction"], by_label(blocks))
    yield counter("kvstow_transfer_bytes", "Bytes transferred on one rank", ["direction"], by_label(num_bytes))
    for name, text, attribute in (
        ("kvstow_transfer_duration_seconds", "Time of the copy on the slowest rank", "seconds"),
        ("kvstow_transfer_size_bytes", "Bytes of an op on one rank", "size_bytes"),
        ("kvstow_transfer_queue_wait_seconds", "Time in the queue of the slowest rank", "queue_seconds"),
    ):
        rows = [((direction,), getattr(one, attribute)) for direction, one in transfers.items()]
        yield histogram(name, text, ["direction"], rows)


def _kept_by_ranks(ranks: tuple[RankStatus, ...]) -> Iterator[Metric]:
    """Counters that a rank keeps: they start again when it does."""
    yield counter(
        "kvstow_transfer_busy_seconds",
        "Time in which the rank copied",
        ["direction", "rank"],
        _of_directions(ranks, "load_busy_seconds", "store_busy_seconds"),
    )
    yield counter(
        "kvstow_pin_failures",
        "Attempts of pinning that failed",
        ["pool", "rank", "reason"],
        [
            ((POOL_NAME, str(rank.rank), reason), rank.pin_failures.get(reason, 0))
            for rank in ranks
            for reason in _PIN_FAILURES
        ],
    )


def _of_directions(ranks: tuple[RankStatus, ...], load: str, store: str) -> list[Row]:
    return [
        ((direction, str(rank.rank)), getattr(rank, attribute))
        for rank in ranks
        for direction, attribute in (("load", load), ("store", store))
    ]


def _ages(stats: EngineStats) -> Iterator[Metric]:
    for name, text, snapshot in (
        (
            "kvstow_block_lifetime_seconds",
            "How long blocks had been stored when they were evicted for room, of one in 61",
            stats.ages.lifetime,
        ),
        (
            "kvstow_block_idle_before_evict_seconds",
            "How long blocks had not been used when they were evicted for room, of one in 61",
            stats.ages.idle,
        ),
        (
            "kvstow_block_reuse_gap_seconds",
            "How long blocks had not been used when a look-up found them, of one in 61",
            stats.ages.reuse_gap,
        ),
    ):
        yield histogram(name, text, ["pool"], [((POOL_NAME,), snapshot)])


def _lookups(stats: EngineStats) -> Iterator[Metric]:
    yield counter("kvstow_lookups", "Look-ups, by result", ["result"], by_label(stats.lookups.results))
    yield histogram(
        "kvstow_lookup_duration_seconds", "Time of a look-up in the index", [], [((), stats.lookups.seconds)]
    )
    yield from _tokens(stats)
    yield counter(
        "kvstow_fallbacks",
        "Look-ups and loads that ended without blocks for another reason than their absence",
        ["reason"],
        by_label(stats.fallbacks),
    )
    yield counter("kvstow_store_blocks", "Blocks to store, by outcome", ["outcome"], by_label(stats.stores))


def _tokens(stats: EngineStats) -> Iterator[Metric]:
    """No rows while the number of tokens in a block is unknown."""
    queries: list[Row] = []
    hits: list[Row] = []
    misses: list[Row] = []
    tokens, lookups = stats.block_tokens, stats.lookups
    if tokens is not None:
        queries, hits = scalar(lookups.query_blocks * tokens), [((SOURCE,), lookups.hit_blocks * tokens)]
        misses = by_label({reason: count * tokens for reason, count in lookups.miss_blocks.items()})
    yield counter("kvstow_query_tokens", "Tokens of the blocks looked up", [], queries)
    yield counter("kvstow_hit_tokens", "Tokens found", ["source"], hits)
    yield counter("kvstow_miss_tokens", "Tokens not found, or not loaded", ["reason"], misses)


def _faults(stats: EngineStats) -> Iterator[Metric]:
    faults = stats.faults
    yield counter(
        "kvstow_errors",
        "Errors",
        ["component", "code"],
        [((_COMPONENTS.get(code, "engine"), code), count) for code, count in faults.errors.items()],
    )
    yield counter("kvstow_rank_restarts", "Ranks that came back without their memory", [], scalar(faults.rank_restarts))
    yield counter("kvstow_stale_reports", "Reports that a later one has overtaken", [], scalar(faults.stale_reports))
    yield counter("kvstow_stale_completions", "Words on ops that were over", [], scalar(faults.stale_completions))
    yield counter("kvstow_duplicate_completions", "Words said twice", [], scalar(faults.duplicate_completions))
