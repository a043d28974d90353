"""Metric families of pools and their engines: slots, ranks, transfers, lookups, faults.

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
from kvstow.status import RankStatus, Readiness
from kvstow_api.directory import HostedPool
from kvstow_api.metrics.families import Row, by_label, counter, gauge, histogram

SOURCE = "host"

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
    """A pool at the moment of a scrape. `sessions`: the ranks of each live session, by its id."""

    hosted: HostedPool
    stats: EngineStats
    readiness: Readiness
    sessions: Mapping[str, tuple[RankStatus, ...]]

    @property
    def name(self) -> str:
        return self.hosted.name


class Snapshots(NamedTuple):
    """All pools of a host. On a node every family has the label `pool`, and those of ranks `session`, too; an embedded
    engine has one pool and one session, and only the families that had the label `pool` before."""

    pools: Sequence[PoolSnapshot]
    is_node: bool
    host_errors: Mapping[str, int]
    """Of no pool."""

    @property
    def pool_label(self) -> tuple[str, ...]:
        """The labels that a family without `pool` has more on a node."""
        return ("pool",) if self.is_node else ()

    @property
    def session_labels(self) -> tuple[str, ...]:
        return ("pool", "session") if self.is_node else ()

    def labelled(self) -> Iterator[tuple[tuple[str, ...], EngineStats]]:
        """The values of `pool_label`, and the counters of each pool."""
        for pool in self.pools:
            yield (pool.name,) if self.is_node else (), pool.stats

    def ranks(self) -> Iterator[tuple[tuple[str, ...], PoolSnapshot, RankStatus]]:
        """The values of `session_labels`, the pool, and each rank."""
        for pool in self.pools:
            for session, ranks in pool.sessions.items():
                labels = (pool.name, session) if self.is_node else ()
                yield from ((labels, pool, rank) for rank in ranks)


def engine_families(taken: Snapshots, now: float) -> Iterator[Metric]:
    """All families of pools and ranks. `now`: seconds since the epoch."""
    yield from _pools(taken)
    yield from _ranks(taken, now)
    yield from _transfers(taken)
    yield from _ages(taken)
    yield from _lookups(taken)
    yield from _faults(taken)


def _pools(taken: Snapshots) -> Iterator[Metric]:
    stats = [(pool.name, pool.stats) for pool in taken.pools]
    for name, text, field in (
        ("kvstow_pool_capacity_blocks", "Configured slots, the same on every rank", "capacity_slots"),
        ("kvstow_pool_usable_blocks", "Slots pinned on every rank", "usable_slots"),
        ("kvstow_pool_block_bytes", "Size of a slot on one rank", "slot_bytes"),
    ):
        yield gauge(name, text, ["pool"], [((pool,), getattr(one.pool, field)) for pool, one in stats])
    yield gauge(
        "kvstow_pool_blocks",
        "Usable slots of one rank by state",
        ["pool", "state"],
        _joined(by_label(asdict(one.pool.slots), pool) for pool, one in stats),
    )
    yield gauge(
        "kvstow_leases", "Open leases", taken.pool_label, [(label, one.pool.leases) for label, one in taken.labelled()]
    )
    yield counter(
        "kvstow_allocation_failures",
        "Stores that did not find room for all their blocks",
        ["pool"],
        [((pool,), one.allocation_failures) for pool, one in stats],
    )
    yield counter(
        "kvstow_evicted_blocks",
        "Evicted blocks by reason",
        ["pool", "reason"],
        _joined(by_label(one.evictions, pool) for pool, one in stats),
    )
    yield counter(
        "kvstow_evicted_bytes",
        "Bytes evicted on one rank, by reason",
        ["pool", "reason"],
        _joined(
            by_label({reason: count * one.pool.slot_bytes for reason, count in one.evictions.items()}, pool)
            for pool, one in stats
        ),
    )


def _joined(rows: Iterable[Iterable[Row]]) -> list[Row]:
    return list(chain.from_iterable(rows))


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


def _ranks(taken: Snapshots, now: float) -> Iterator[Metric]:
    ranks = list(taken.ranks())
    yield gauge(
        "kvstow_rank_heartbeat_timestamp_seconds",
        "Time of the rank's last report, 0 if there was none",
        [*taken.session_labels, "rank"],
        [((*labels, str(rank.rank)), _heard_at(rank, now)) for labels, _, rank in ranks],
    )
    yield gauge(
        "kvstow_pool_capacity_bytes",
        "Configured bytes",
        ["pool", *taken.session_labels[1:], "rank"],
        [
            ((pool.name, *labels[1:], str(rank.rank)), pool.readiness.capacity_slots * rank.slot_bytes)
            for labels, pool, rank in ranks
        ],
    )
    for family in _RANK_FAMILIES:
        yield _family_of(family, taken, ranks)


def _heard_at(rank: RankStatus, now: float) -> float:
    return 0.0 if rank.last_report_age_seconds is None else now - rank.last_report_age_seconds


def _family_of(
    family: _RankFamily, taken: Snapshots, ranks: Iterable[tuple[tuple[str, ...], PoolSnapshot, RankStatus]]
) -> Metric:
    before = ("pool", *taken.session_labels[1:]) if family.of_pool else taken.session_labels
    names = [*before, "rank", *([family.label] if family.label else [])]
    rows: list[Row] = []
    for values, pool, rank in ranks:
        labels = (pool.name, *values[1:], str(rank.rank)) if family.of_pool else (*values, str(rank.rank))
        value = family.value(rank)
        if isinstance(value, Mapping):
            rows += by_label(value, *labels)
        elif value is not None:
            rows.append((labels, value))
    return (counter if family.is_counter else gauge)(family.name, family.text, names, rows)


# -- traffic ---------------------------------------------------------------------------------------------------------


def _transfers(taken: Snapshots) -> Iterator[Metric]:
    label, stats = taken.pool_label, list(taken.labelled())
    pending = [(values, one.transfers.pending) for values, one in stats]
    yield gauge(
        "kvstow_transfers_inflight",
        "Ops that some rank has not finished",
        [*label, "direction"],
        _joined(by_label({"load": one.loads, "store": one.stores}, *values) for values, one in pending),
    )
    yield gauge(
        "kvstow_transfer_inflight_bytes",
        "Bytes of these ops on one rank",
        [*label, "direction"],
        _joined(by_label({"load": one.load_bytes, "store": one.store_bytes}, *values) for values, one in pending),
    )
    yield gauge(
        "kvstow_transfers_stuck",
        "Ops older than the transfer timeout",
        label,
        [(values, one.stuck) for values, one in pending],
    )
    yield gauge(
        "kvstow_transfer_oldest_seconds",
        "Age of the oldest op",
        label,
        [(values, one.oldest_seconds) for values, one in pending],
    )
    ended = [((*values, name), one.transfers.of(name)) for values, one in stats for name in DIRECTIONS]
    results = [((*values, result), getattr(one, result)) for values, one in ended for result in ("ok", "error")]
    yield counter("kvstow_transfers", "Ops that ended, by result", [*label, "direction", "result"], results)
    for name, text, field in (
        ("kvstow_transfer_blocks", "Blocks transferred", "blocks"),
        ("kvstow_transfer_bytes", "Bytes transferred on one rank", "bytes"),
    ):
        yield counter(name, text, [*label, "direction"], [(values, getattr(one, field)) for values, one in ended])
    for name, text, field in (
        ("kvstow_transfer_duration_seconds", "Duration of the copy on the slowest rank", "seconds"),
        ("kvstow_transfer_size_bytes", "Bytes of an op on one rank", "size_bytes"),
        ("kvstow_transfer_queue_wait_seconds", "Time in the queue of the slowest rank", "queue_seconds"),
    ):
        yield histogram(name, text, [*label, "direction"], [(values, getattr(one, field)) for values, one in ended])


def _ages(taken: Snapshots) -> Iterator[Metric]:
    for name, text, field in (
        ("lifetime", "Age of blocks that were evicted for capacity", "lifetime"),
        ("idle_before_evict", "Time since the last use of blocks that were evicted for capacity", "idle"),
        ("reuse_gap", "Time since the last use of blocks that a lookup found", "reuse_gap"),
    ):
        rows = [((pool.name,), getattr(pool.stats.ages, field)) for pool in taken.pools]
        yield histogram(f"kvstow_block_{name}_seconds", f"{text}, for one block in 61", ["pool"], rows)


def _lookups(taken: Snapshots) -> Iterator[Metric]:
    label, stats = taken.pool_label, list(taken.labelled())
    yield counter(
        "kvstow_lookups",
        "Lookups by result",
        [*label, "result"],
        _joined(by_label(one.lookups.results, *values) for values, one in stats),
    )
    yield histogram(
        "kvstow_lookup_duration_seconds",
        "Duration of an index lookup",
        label,
        [(values, one.lookups.seconds) for values, one in stats],
    )
    yield from _tokens(taken)
    yield counter(
        "kvstow_fallbacks",
        "Lookups and loads that missed blocks for another reason than their absence",
        [*label, "reason"],
        _joined(by_label(one.fallbacks, *values) for values, one in stats),
    )
    yield counter(
        "kvstow_store_blocks",
        "Blocks offered to the pool, by outcome",
        [*label, "outcome"],
        _joined(by_label(one.stores, *values) for values, one in stats),
    )


def _tokens(taken: Snapshots) -> Iterator[Metric]:
    """Without series of pools whose number of tokens in a block is unknown."""
    label = taken.pool_label
    queries: list[Row] = []
    hits: list[Row] = []
    misses: list[Row] = []
    for values, stats in taken.labelled():
        lookups, tokens = stats.lookups, stats.block_tokens
        if tokens is not None:
            queries.append((values, lookups.query_blocks * tokens))
            hits.append(((*values, SOURCE), lookups.hit_blocks * tokens))
            misses += by_label({reason: count * tokens for reason, count in lookups.miss_blocks.items()}, *values)
    yield counter("kvstow_query_tokens", "Tokens of the blocks looked up", label, queries)
    yield counter("kvstow_hit_tokens", "Tokens found", [*label, "source"], hits)
    yield counter("kvstow_miss_tokens", "Tokens not found, or not loaded, by reason", [*label, "reason"], misses)


def _faults(taken: Snapshots) -> Iterator[Metric]:
    stats = list(taken.labelled())
    errors = _joined(_error_rows(one.faults.errors, *values) for values, one in stats)
    if taken.is_node:
        errors += _error_rows(taken.host_errors, "")
    yield counter("kvstow_errors", "Errors by component and code", [*taken.pool_label, "component", "code"], errors)
    for field, text in _FAULTS.items():
        rows = [(values, getattr(one.faults, field)) for values, one in stats]
        yield counter(f"kvstow_{field}", text, taken.pool_label, rows)


def _error_rows(errors: Mapping[str, int], *before: str) -> list[Row]:
    return [((*before, _COMPONENTS.get(code, "engine"), code), count) for code, count in errors.items()]
