"""Metric families of the engine: pool, ranks, transfers, lookups, faults.

A new figure of a rank is one line of `_RANK_FAMILIES`, a new fault one of `_FAULTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from operator import attrgetter
from typing import NamedTuple, get_args

from prometheus_client import Metric

from kvstow.errors import PinError
from kvstow.stats import DIRECTIONS, EngineState, EngineStats
from kvstow.status import RankStatus, Readiness
from kvstow_api.metrics.families import Row, by_label, counter, gauge, histogram, scalar
from kvstow_api.views import POOL_NAME

SOURCE = "host"

_PIN_FAILURES = (*PinError.PIN_FAILURES, "internal")
_COMPONENTS = {"admin_server": "admin_server", "rank_report": "connector"}
"""The failed component, by error code; the engine for all other codes."""
_STATES: tuple[EngineState, ...] = get_args(EngineState)
_FAULTS = {
    "rank_restarts": "Ranks that restarted without their memory",
    "stale_reports": "Reports that arrived after a newer one",
    "stale_completions": "Completions of ops that had already ended",
    "duplicate_completions": "Completions received twice",
}
"""Help of the counters of `FaultStats`, by field."""


def engine_families(stats: EngineStats, readiness: Readiness, now: float) -> Iterator[Metric]:
    """All families of the engine. `now`: seconds since the epoch."""
    yield from _pool(stats)
    yield from _ranks(readiness, now)
    yield from _transfers(stats)
    yield from _ages(stats)
    yield from _lookups(stats)
    yield from _faults(stats)


def _pool(stats: EngineStats) -> Iterator[Metric]:
    pool, evicted = stats.pool, stats.evictions
    evicted_bytes = {reason: count * pool.slot_bytes for reason, count in evicted.items()}
    for name, text, value in (
        ("kvstow_pool_capacity_blocks", "Configured slots, the same on every rank", pool.capacity_slots),
        ("kvstow_pool_usable_blocks", "Slots pinned on every rank", pool.usable_slots),
        ("kvstow_pool_block_bytes", "Size of a slot on one rank", pool.slot_bytes),
    ):
        yield gauge(name, text, ["pool"], [((POOL_NAME,), value)])
    yield gauge(
        "kvstow_pool_blocks", "Usable slots of one rank by state", ["pool", "state"], _of_pool(asdict(pool.slots))
    )
    yield gauge("kvstow_leases", "Open leases", [], scalar(pool.leases))
    yield counter(
        "kvstow_allocation_failures",
        "Stores that did not find room for all their blocks",
        ["pool"],
        [((POOL_NAME,), stats.allocation_failures)],
    )
    yield counter("kvstow_evicted_blocks", "Evicted blocks by reason", ["pool", "reason"], _of_pool(evicted))
    yield counter(
        "kvstow_evicted_bytes", "Bytes evicted on one rank, by reason", ["pool", "reason"], _of_pool(evicted_bytes)
    )


def _of_pool(counts: Mapping[str, float]) -> list[Row]:
    return by_label(counts, POOL_NAME)


# -- ranks -----------------------------------------------------------------------------------------------------------


class _RankFamily(NamedTuple):
    """One value per rank, or one per item of a mapping, which the label `label` then names. None has no series."""

    name: str
    text: str
    value: Callable[[RankStatus], float | Mapping[str, float] | None]
    label: str | None = None
    is_counter: bool = False
    of_pool: bool = True


def _chunks(rank: RankStatus) -> Mapping[str, float]:
    pending = max(0, rank.chunks_total - rank.chunks_done - rank.chunks_failed)
    return {"pending": pending, "done": rank.chunks_done, "failed": rank.chunks_failed}


_RANK_FAMILIES = (
    _RankFamily("kvstow_pool_pinned_bytes", "Bytes pinned", attrgetter("pinned_bytes")),
    _RankFamily("kvstow_pool_locked_bytes", "Pinned bytes that are locked in memory", attrgetter("locked_bytes")),
    _RankFamily("kvstow_pool_resident_bytes", "Bytes resident in memory", attrgetter("resident_bytes")),
    _RankFamily(
        "kvstow_pool_numa_bytes",
        "Bytes of the pool by NUMA node, if the kernel reports it",
        attrgetter("numa_bytes"),
        label="numa_node",
    ),
    _RankFamily(
        "kvstow_pin_progress_ratio",
        "Pinned share of the bytes to pin, 0 to 1",
        lambda rank: rank.pinned_bytes / rank.target_bytes if rank.target_bytes else 0.0,
    ),
    _RankFamily("kvstow_pin_elapsed_seconds", "Time spent pinning", attrgetter("pin_elapsed_seconds")),
    _RankFamily(
        "kvstow_pin_rate_bytes_per_second",
        "Bytes pinned by the current or latest growth of the pool, divided by its duration",
        attrgetter("pin_rate_bytes_per_second"),
    ),
    _RankFamily("kvstow_pin_chunks", "Chunks of memory to pin, by state", _chunks, label="state"),
    _RankFamily(
        "kvstow_pin_failures",
        "Failed attempts to pin, since the rank started",
        lambda rank: {reason: rank.pin_failures.get(reason, 0) for reason in _PIN_FAILURES},
        label="reason",
        is_counter=True,
    ),
    _RankFamily(
        "kvstow_rank_pending_ops", "Ops that the rank has not finished", attrgetter("pending_ops"), of_pool=False
    ),
    _RankFamily(
        "kvstow_transfer_queue_depth",
        "Ops on the rank that wait behind others of their direction",
        lambda rank: {"load": rank.queued_loads, "store": rank.queued_stores},
        label="direction",
        of_pool=False,
    ),
    _RankFamily(
        "kvstow_transfer_busy_seconds",
        "Time in which the rank was copying, since it started",
        lambda rank: {"load": rank.load_busy_seconds, "store": rank.store_busy_seconds},
        label="direction",
        is_counter=True,
        of_pool=False,
    ),
)


def _ranks(readiness: Readiness, now: float) -> Iterator[Metric]:
    ranks = readiness.ranks
    yield gauge(
        "kvstow_state",
        "1 for the present state of the engine",
        ["state"],
        [((state,), float(state == readiness.state)) for state in _STATES],
    )
    yield gauge(
        "kvstow_rank_heartbeat_timestamp_seconds",
        "Time of the rank's last report, 0 if there was none",
        ["rank"],
        [((str(rank.rank),), _heard_at(rank, now)) for rank in ranks],
    )
    yield gauge(
        "kvstow_pool_capacity_bytes",
        "Configured bytes",
        ["pool", "rank"],
        [((POOL_NAME, str(rank.rank)), readiness.capacity_slots * rank.slot_bytes) for rank in ranks],
    )
    for family in _RANK_FAMILIES:
        yield _family_of(family, ranks)


def _heard_at(rank: RankStatus, now: float) -> float:
    return 0.0 if rank.last_report_age_seconds is None else now - rank.last_report_age_seconds


def _family_of(family: _RankFamily, ranks: tuple[RankStatus, ...]) -> Metric:
    names = [*(["pool"] if family.of_pool else []), "rank", *([family.label] if family.label else [])]
    rows: list[Row] = []
    for rank in ranks:
        labels = (POOL_NAME, str(rank.rank)) if family.of_pool else (str(rank.rank),)
        value = family.value(rank)
        if isinstance(value, Mapping):
            rows += by_label(value, *labels)
        elif value is not None:
            rows.append((labels, value))
    return (counter if family.is_counter else gauge)(family.name, family.text, names, rows)


# -- traffic ---------------------------------------------------------------------------------------------------------


def _transfers(stats: EngineStats) -> Iterator[Metric]:
    pending = stats.transfers.pending
    ops = {"load": pending.loads, "store": pending.stores}
    num_bytes = {"load": pending.load_bytes, "store": pending.store_bytes}
    yield gauge("kvstow_transfers_inflight", "Ops that some rank has not finished", ["direction"], by_label(ops))
    yield gauge("kvstow_transfer_inflight_bytes", "Bytes of these ops on one rank", ["direction"], by_label(num_bytes))
    yield gauge("kvstow_transfers_stuck", "Ops older than the transfer timeout", [], scalar(pending.stuck))
    yield gauge("kvstow_transfer_oldest_seconds", "Age of the oldest op", [], scalar(pending.oldest_seconds))
    ended = {direction: stats.transfers.of(direction) for direction in DIRECTIONS}
    results = [((name, result), getattr(one, result)) for name, one in ended.items() for result in ("ok", "error")]
    yield counter("kvstow_transfers", "Ops that ended, by result", ["direction", "result"], results)
    for name, text, field in (
        ("kvstow_transfer_blocks", "Blocks transferred", "blocks"),
        ("kvstow_transfer_bytes", "Bytes transferred on one rank", "bytes"),
    ):
        yield counter(name, text, ["direction"], [((key,), getattr(one, field)) for key, one in ended.items()])
    for name, text, field in (
        ("kvstow_transfer_duration_seconds", "Duration of the copy on the slowest rank", "seconds"),
        ("kvstow_transfer_size_bytes", "Bytes of an op on one rank", "size_bytes"),
        ("kvstow_transfer_queue_wait_seconds", "Time in the queue of the slowest rank", "queue_seconds"),
    ):
        yield histogram(name, text, ["direction"], [((key,), getattr(one, field)) for key, one in ended.items()])


def _ages(stats: EngineStats) -> Iterator[Metric]:
    for name, text, snapshot in (
        ("lifetime", "Age of blocks that were evicted for capacity", stats.ages.lifetime),
        ("idle_before_evict", "Time since the last use of blocks that were evicted for capacity", stats.ages.idle),
        ("reuse_gap", "Time since the last use of blocks that a lookup found", stats.ages.reuse_gap),
    ):
        rows = [((POOL_NAME,), snapshot)]
        yield histogram(f"kvstow_block_{name}_seconds", f"{text}, for one block in 61", ["pool"], rows)


def _lookups(stats: EngineStats) -> Iterator[Metric]:
    lookups = stats.lookups
    yield counter("kvstow_lookups", "Lookups by result", ["result"], by_label(lookups.results))
    yield histogram("kvstow_lookup_duration_seconds", "Duration of an index lookup", [], [((), lookups.seconds)])
    yield from _tokens(stats)
    yield counter(
        "kvstow_fallbacks",
        "Lookups and loads that missed blocks for another reason than their absence",
        ["reason"],
        by_label(stats.fallbacks),
    )
    yield counter("kvstow_store_blocks", "Blocks offered to the pool, by outcome", ["outcome"], by_label(stats.stores))


def _tokens(stats: EngineStats) -> Iterator[Metric]:
    """Without series while the number of tokens in a block is unknown."""
    lookups, tokens = stats.lookups, stats.block_tokens
    queries: list[Row] = []
    hits: list[Row] = []
    misses: list[Row] = []
    if tokens is not None:
        queries, hits = scalar(lookups.query_blocks * tokens), [((SOURCE,), lookups.hit_blocks * tokens)]
        misses = by_label({reason: count * tokens for reason, count in lookups.miss_blocks.items()})
    yield counter("kvstow_query_tokens", "Tokens of the blocks looked up", [], queries)
    yield counter("kvstow_hit_tokens", "Tokens found", ["source"], hits)
    yield counter("kvstow_miss_tokens", "Tokens not found, or not loaded, by reason", ["reason"], misses)


def _faults(stats: EngineStats) -> Iterator[Metric]:
    errors = [((_COMPONENTS.get(code, "engine"), code), count) for code, count in stats.faults.errors.items()]
    yield counter("kvstow_errors", "Errors by component and code", ["component", "code"], errors)
    for field, text in _FAULTS.items():
        yield counter(f"kvstow_{field}", text, [], scalar(getattr(stats.faults, field)))
