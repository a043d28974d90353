"""Metric families of pools and their engines: slots, ranks, transfers, lookups, faults. All have the labels `POOL`.

A new figure of a rank is one line of `_RANK_FAMILIES`, a new fault one of `_FAULTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from prometheus_client import Metric

from kvstow.errors import PinError
from kvstow.stats import DIRECTIONS, EngineStats
from kvstow.status import SESSION_STATES, RankStatus, Readiness, SessionState
from kvstow_api.directory import HostedPool
from kvstow_api.metrics.families import Row, by_label, counter, gauge, histogram
from kvstow_api.rankcounters import CountedRank
from kvstow_api.readychecks import rank_failure

SOURCE = "host"
POOL = ("pool", "model")
"""The labels of a pool: its name, and its model, which is empty if unknown."""
RANK = (*POOL, "rank")

_PIN_FAILURES = (*PinError.PIN_FAILURES, "internal")
_COMPONENTS = {"admin_server": "admin_server", "rank_report": "connector"}
"""The failed component, by error code; the engine for all other codes."""
_FAULTS = {
    "rank_restarts": "Ranks that restarted without their memory",
    "stale_reports": "Reports that arrived after a newer one",
    "stale_completions": "Completions of ops that had already ended",
    "duplicate_completions": "Completions received twice",
}
"""Help of the counters of `FaultStats`, by field."""


class PoolSnapshot(NamedTuple):
    """A pool at the moment of a scrape. `ranks`: those of all its live engines, by number; `counted`: what the ranks of
    each number have counted in all its engines, ended ones included."""

    hosted: HostedPool
    stats: EngineStats
    readiness: Readiness
    ranks: Mapping[int, Sequence[RankStatus]]
    counted: Sequence[CountedRank]
    session_states: Mapping[SessionState, int]

    @property
    def labels(self) -> tuple[str, str]:
        """The values of `POOL`."""
        return self.hosted.name, self.hosted.model


class Snapshots(NamedTuple):
    """All pools of a host. `host_errors` are of no pool."""

    pools: Sequence[PoolSnapshot]
    host_errors: Mapping[str, int]

    def stats(self) -> list[tuple[tuple[str, str], EngineStats]]:
        """The values of `POOL`, and the counters of each pool."""
        return [(pool.labels, pool.stats) for pool in self.pools]


def engine_families(taken: Snapshots, now: float) -> Iterator[Metric]:
    """All families of pools and ranks. `now`: seconds since the epoch."""
    yield from _pools(taken)
    yield from _ranks(taken, now)
    yield from _transfers(taken)
    yield from _ages(taken)
    yield from _lookups(taken)
    yield from _faults(taken)


def _pools(taken: Snapshots) -> Iterator[Metric]:
    stats = taken.stats()
    for name, text, field in (
        ("kvstow_pool_capacity_blocks", "Configured slots, the same on every rank", "capacity_slots"),
        ("kvstow_pool_usable_blocks", "Slots that the pool can use on every rank", "usable_slots"),
        ("kvstow_pool_block_bytes", "Size of a slot on one rank", "slot_bytes"),
    ):
        yield gauge(name, text, POOL, [(pool, getattr(one.pool, field)) for pool, one in stats])
    for name, text, field in (
        ("kvstow_pool_granted_bytes", "What the pool has of the host's memory, on all ranks together", "granted_bytes"),
        (
            "kvstow_pool_due_bytes",
            "What the pool should have: as much as it has use for, up to its fair share",
            "due_bytes",
        ),
    ):
        yield gauge(name, text, POOL, [(pool.labels, getattr(pool.hosted, field)) for pool in taken.pools])
    yield gauge(
        "kvstow_sessions",
        "Engines that use the pool, by state",
        [*POOL, "state"],
        [
            ((*pool.labels, state), pool.session_states.get(state, 0))
            for pool in taken.pools
            for state in SESSION_STATES
        ],
    )
    yield gauge(
        "kvstow_pool_blocks",
        "Usable slots of one rank by state",
        [*POOL, "state"],
        _joined(by_label(asdict(one.pool.slots), *pool) for pool, one in stats),
    )
    yield gauge("kvstow_leases", "Open leases", POOL, [(pool, one.pool.leases) for pool, one in stats])
    yield counter(
        "kvstow_allocation_failures",
        "Stores that did not find room for all their blocks",
        POOL,
        [(pool, one.allocation_failures) for pool, one in stats],
    )
    yield counter(
        "kvstow_evicted_blocks",
        "Evicted blocks by reason",
        [*POOL, "reason"],
        _joined(by_label(one.evictions, *pool) for pool, one in stats),
    )
    yield counter(
        "kvstow_evicted_bytes",
        "Bytes evicted on one rank, by reason",
        [*POOL, "reason"],
        _joined(
            by_label({reason: count * one.pool.slot_bytes for reason, count in one.evictions.items()}, *pool)
            for pool, one in stats
        ),
    )


def _joined(rows: Iterable[Iterable[Row]]) -> list[Row]:
    return list(chain.from_iterable(rows))


# -- ranks -----------------------------------------------------------------------------------------------------------


class _RankFamily(NamedTuple):
    """A gauge with one value for the ranks of each number in a pool, or one per item of a mapping, which the label
    `label` then names. `over` makes one value of those of several engines. None has no series."""

    name: str
    text: str
    over: Callable[[Iterable[float]], float]
    value: Callable[[RankStatus], float | Mapping[str, float] | None]
    label: str | None = None


def _chunks(rank: RankStatus) -> Mapping[str, float]:
    pending = max(0, rank.chunks_total - rank.chunks_done - rank.chunks_failed)
    return {"pending": pending, "done": rank.chunks_done, "failed": rank.chunks_failed}


_RANK_FAMILIES = (
    _RankFamily(
        "kvstow_pool_pinned_bytes", "Bytes pinned by the engine with the fewest", min, attrgetter("pinned_bytes")
    ),
    _RankFamily(
        "kvstow_pool_locked_bytes",
        "Pinned bytes that are locked in memory, of the engine with the fewest",
        min,
        attrgetter("locked_bytes"),
    ),
    _RankFamily(
        "kvstow_pool_resident_bytes",
        "Bytes resident in memory, of the engine with the fewest",
        min,
        attrgetter("resident_bytes"),
    ),
    _RankFamily(
        "kvstow_pool_numa_bytes",
        "Bytes of the pool by NUMA node, if the kernel reports it",
        max,
        attrgetter("numa_bytes"),
        label="numa_node",
    ),
    _RankFamily(
        "kvstow_pin_progress_ratio",
        "Pinned share of the bytes to pin, 0 to 1, of the engine with the least",
        min,
        lambda rank: rank.pinned_bytes / rank.target_bytes if rank.target_bytes else 0.0,
    ),
    _RankFamily(
        "kvstow_pin_elapsed_seconds",
        "Time spent pinning, of the engine that took longest",
        max,
        attrgetter("pin_elapsed_seconds"),
    ),
    _RankFamily(
        "kvstow_pin_rate_bytes_per_second",
        "Bytes pinned by the current or latest growth of the pool, divided by its duration, of the slowest engine",
        min,
        attrgetter("pin_rate_bytes_per_second"),
    ),
    _RankFamily("kvstow_pin_chunks", "Chunks of memory to pin, by state", sum, _chunks, label="state"),
    _RankFamily("kvstow_rank_pending_ops", "Ops that the rank has not finished", sum, attrgetter("pending_ops")),
    _RankFamily(
        "kvstow_transfer_queue_depth",
        "Ops on the rank that wait behind others of their direction",
        sum,
        lambda rank: {"load": rank.queued_loads, "store": rank.queued_stores},
        label="direction",
    ),
)


def _ranks(taken: Snapshots, now: float) -> Iterator[Metric]:
    ranks = [
        ((*pool.labels, str(number)), pool, found)
        for pool in taken.pools
        for number, found in sorted(pool.ranks.items())
    ]
    yield gauge(
        "kvstow_rank_heartbeat_timestamp_seconds",
        "Time of the rank's last report, of the engine that is silent longest; 0 if there was none",
        RANK,
        [(labels, min(_heard_at(rank, now) for rank in found)) for labels, _, found in ranks],
    )
    yield gauge(
        "kvstow_rank_ready",
        "1 while the rank reports and can copy, in all engines",
        RANK,
        [
            (labels, float(all(rank_failure(rank, pool.hosted.facade.config.report_timeout) is None for rank in found)))
            for labels, pool, found in ranks
        ],
    )
    for family in _RANK_FAMILIES:
        yield _family_of(family, ((labels, found) for labels, _, found in ranks))
    yield from _configured_ranks(taken)


def _configured_ranks(taken: Snapshots) -> Iterator[Metric]:
    """Also of pools that no engine uses."""
    ranks = [
        ((*pool.labels, str(number)), number, pool)
        for pool in taken.pools
        for number in range(pool.hosted.facade.config.num_ranks)
    ]
    yield gauge(
        "kvstow_pool_capacity_bytes",
        "Configured bytes",
        RANK,
        [
            (labels, pool.readiness.capacity_slots * pool.hosted.facade.config.slot_bytes_of(number))
            for labels, number, pool in ranks
        ],
    )
    counted = [(labels, pool.counted[number]) for labels, number, pool in ranks]
    yield counter(
        "kvstow_pin_failures",
        "Failed attempts to pin",
        [*RANK, "reason"],
        _joined(
            by_label({reason: one.pin_failures.get(reason, 0) for reason in _PIN_FAILURES}, *labels)
            for labels, one in counted
        ),
    )
    yield counter(
        "kvstow_transfer_busy_seconds",
        "Time in which the rank was copying, in all engines together",
        [*RANK, "direction"],
        _joined(
            by_label({"load": one.load_busy_seconds, "store": one.store_busy_seconds}, *labels)
            for labels, one in counted
        ),
    )


def _heard_at(rank: RankStatus, now: float) -> float:
    return 0.0 if rank.last_report_age_seconds is None else now - rank.last_report_age_seconds


def _family_of(family: _RankFamily, ranks: Iterable[tuple[tuple[str, ...], Sequence[RankStatus]]]) -> Metric:
    rows: list[Row] = []
    for labels, found in ranks:
        values = [value for value in map(family.value, found) if value is not None]
        numbers = [value for value in values if not isinstance(value, Mapping)]
        mappings = [value for value in values if isinstance(value, Mapping)]
        if numbers:
            rows.append((labels, family.over(numbers)))
        names = dict.fromkeys(chain.from_iterable(mappings))
        rows += [((*labels, name), family.over(one.get(name, 0) for one in mappings)) for name in names]
    return gauge(family.name, family.text, [*RANK, *([family.label] if family.label else [])], rows)


# -- traffic ---------------------------------------------------------------------------------------------------------


def _transfers(taken: Snapshots) -> Iterator[Metric]:
    stats = taken.stats()
    pending = [(values, one.transfers.pending) for values, one in stats]
    yield gauge(
        "kvstow_transfers_inflight",
        "Ops that some rank has not finished",
        [*POOL, "direction"],
        _joined(by_label({"load": one.loads, "store": one.stores}, *values) for values, one in pending),
    )
    yield gauge(
        "kvstow_transfer_inflight_bytes",
        "Bytes of these ops on one rank",
        [*POOL, "direction"],
        _joined(by_label({"load": one.load_bytes, "store": one.store_bytes}, *values) for values, one in pending),
    )
    yield gauge(
        "kvstow_transfers_stuck",
        "Ops older than the transfer timeout",
        POOL,
        [(values, one.stuck) for values, one in pending],
    )
    yield gauge(
        "kvstow_transfer_oldest_seconds",
        "Age of the oldest op",
        POOL,
        [(values, one.oldest_seconds) for values, one in pending],
    )
    ended = [((*values, name), one.transfers.of(name)) for values, one in stats for name in DIRECTIONS]
    results = [((*values, result), getattr(one, result)) for values, one in ended for result in ("ok", "error")]
    yield counter("kvstow_transfers", "Ops that ended, by result", [*POOL, "direction", "result"], results)
    for name, text, field in (
        ("kvstow_transfer_blocks", "Blocks transferred", "blocks"),
        ("kvstow_transfer_bytes", "Bytes transferred on one rank", "bytes"),
    ):
        yield counter(name, text, [*POOL, "direction"], [(values, getattr(one, field)) for values, one in ended])
    for name, text, field in (
        ("kvstow_transfer_duration_seconds", "Duration of the copy on the slowest rank", "seconds"),
        ("kvstow_transfer_size_bytes", "Bytes of an op on one rank", "size_bytes"),
        ("kvstow_transfer_queue_wait_seconds", "Time in the queue of the slowest rank", "queue_seconds"),
    ):
        yield histogram(name, text, [*POOL, "direction"], [(values, getattr(one, field)) for values, one in ended])


def _ages(taken: Snapshots) -> Iterator[Metric]:
    for name, text, field in (
        ("lifetime", "Age of blocks that were evicted for capacity", "lifetime"),
        ("idle_before_evict", "Time since the last use of blocks that were evicted for capacity", "idle"),
        ("reuse_gap", "Time since the last use of blocks that a lookup found", "reuse_gap"),
    ):
        rows = [(pool.labels, getattr(pool.stats.ages, field)) for pool in taken.pools]
        yield histogram(f"kvstow_block_{name}_seconds", f"{text}, for one block in 61", POOL, rows)


def _lookups(taken: Snapshots) -> Iterator[Metric]:
    stats = taken.stats()
    yield counter(
        "kvstow_lookups",
        "Lookups by result",
        [*POOL, "result"],
        _joined(by_label(one.lookups.results, *values) for values, one in stats),
    )
    yield histogram(
        "kvstow_lookup_duration_seconds",
        "Duration of an index lookup",
        POOL,
        [(values, one.lookups.seconds) for values, one in stats],
    )
    yield from _tokens(taken)
    yield counter(
        "kvstow_fallbacks",
        "Lookups and loads that missed blocks for another reason than their absence",
        [*POOL, "reason"],
        _joined(by_label(one.fallbacks, *values) for values, one in stats),
    )
    yield counter(
        "kvstow_store_blocks",
        "Blocks offered to the pool, by outcome",
        [*POOL, "outcome"],
        _joined(by_label(one.stores, *values) for values, one in stats),
    )


def _tokens(taken: Snapshots) -> Iterator[Metric]:
    """Without series of pools whose number of tokens in a block is unknown."""
    queries: list[Row] = []
    hits: list[Row] = []
    misses: list[Row] = []
    for values, stats in taken.stats():
        lookups, tokens = stats.lookups, stats.block_tokens
        if tokens is not None:
            queries.append((values, lookups.query_blocks * tokens))
            hits.append(((*values, SOURCE), lookups.hit_blocks * tokens))
            misses += by_label({reason: count * tokens for reason, count in lookups.miss_blocks.items()}, *values)
    yield counter("kvstow_query_tokens", "Tokens of the blocks looked up", POOL, queries)
    yield counter("kvstow_hit_tokens", "Tokens found", [*POOL, "source"], hits)
    yield counter("kvstow_miss_tokens", "Tokens not found, or not loaded, by reason", [*POOL, "reason"], misses)


def _faults(taken: Snapshots) -> Iterator[Metric]:
    stats = taken.stats()
    errors = _joined(_error_rows(one.faults.errors, *values) for values, one in stats)
    errors += _error_rows(taken.host_errors, "", "")
    yield counter("kvstow_errors", "Errors by component and code", [*POOL, "component", "code"], errors)
    for field, text in _FAULTS.items():
        rows = [(values, getattr(one.faults, field)) for values, one in stats]
        yield counter(f"kvstow_{field}", text, POOL, rows)


def _error_rows(errors: Mapping[str, int], *before: str) -> list[Row]:
    return [((*before, _COMPONENTS.get(code, "engine"), code), count) for code, count in errors.items()]
