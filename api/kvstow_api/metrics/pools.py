"""Metric families of pools and their ranks. All have the labels `POOL` or `RANK`.

A new counter of `kvstow.stats` needs nothing here; a new figure of a rank is one line of `_RANK_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

from prometheus_client import Metric

from kvstow.errors import PinError
from kvstow.stats import DIRECTIONS, Counters, DirectionStats, EngineStats, Exposed, Histogram
from kvstow.status import SESSION_STATES, RankStatus, Readiness, SessionState
from kvstow_api.answers import PoolCurveView
from kvstow_api.conditions.pools import rank_failure
from kvstow_api.directory import HostedPool
from kvstow_api.metrics.families import Row, by_label, counter, gauge, histogram, joined
from kvstow_api.sampler import CountedRank

POOL = ("pool", "model")
"""The labels of a pool: its name, and its model, which is empty if unknown."""
RANK = (*POOL, "rank")


class PoolSnapshot(NamedTuple):
    """A pool at the moment of a scrape. `ranks`: those of all its live engines, by number; `counted`: what the ranks of
    each number have counted in all its engines, ended ones included."""

    hosted: HostedPool
    stats: EngineStats
    readiness: Readiness
    ranks: Mapping[int, Sequence[RankStatus]]
    counted: Sequence[CountedRank]
    session_states: Mapping[SessionState, int]
    curve: PoolCurveView

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


# -- counters ------------------------------------------------------------------------------------------------------

SOURCE = "host"
_COMPONENTS = {"admin_server": "admin_server", "rank_report": "connector"}
"""The failed component, by error code; the engine for all other codes."""


class _Source(NamedTuple):
    """Where the values of a family are in the counters, and the values of the labels that this place stands for."""

    read: Callable[[Any], Any]
    labels: tuple[str, ...]


def exposed(kind: type, path: str = "", labels: tuple[str, ...] = ()) -> Iterator[tuple[Exposed, bool, _Source]]:
    """What this dataclass, and those within it, expose, and whether that is a histogram."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        found = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Exposed)]
        if found:
            yield found[0], hint.__origin__ is Histogram, _Source(attrgetter(path + name), labels)
        elif is_dataclass(hint):
            inner = hint if isinstance(hint, type) else type(hint)
            yield from exposed(inner, f"{path}{name}.", (name,) if inner is DirectionStats else labels)


_FAMILIES: dict[tuple[Exposed, bool], list[_Source]] = {}
for _one, _is_histogram, _source in exposed(Counters):
    _FAMILIES.setdefault((_one, _is_histogram), []).append(_source)


def counter_families(taken: Snapshots) -> Iterator[Metric]:
    """Those that `kvstow.stats` describes."""
    stats = taken.stats()
    for (one, is_histogram), sources in _FAMILIES.items():
        labels = [*POOL, *(["direction"] if sources[0].labels else []), *([one.label] if one.label else [])]
        found = [((*pool, *source.labels), source.read(each)) for pool, each in stats for source in sources]
        if is_histogram:
            yield histogram(f"kvstow_{one.name}", one.text, labels, found)
        elif one.label:
            yield counter(f"kvstow_{one.name}", one.text, labels, joined(by_label(value, *at) for at, value in found))
        else:
            yield counter(f"kvstow_{one.name}", one.text, labels, found)


def transfer_families(taken: Snapshots) -> Iterator[Metric]:
    stats = taken.stats()
    pending = [(values, one.transfers.pending) for values, one in stats]
    yield gauge(
        "kvstow_transfers_inflight",
        "Ops that some rank has not finished",
        [*POOL, "direction"],
        joined(by_label({"load": one.loads, "store": one.stores}, *values) for values, one in pending),
    )
    yield gauge(
        "kvstow_transfer_inflight_bytes",
        "Bytes of these ops on one rank",
        [*POOL, "direction"],
        joined(by_label({"load": one.load_bytes, "store": one.store_bytes}, *values) for values, one in pending),
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
    yield counter(
        "kvstow_loads_begun",
        "Loads that began, by their way (layer: within the step that computes with it; async: before it) and why",
        [*POOL, "path", "reason"],
        [
            ((*values, *choice.split("_", 1)), count)
            for values, one in stats
            for choice, count in one.transfers.choices.items()
        ],
    )


def token_families(taken: Snapshots) -> Iterator[Metric]:
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


def error_family(taken: Snapshots) -> Metric:
    errors = joined(_error_rows(one.faults.errors, *values) for values, one in taken.stats())
    errors += _error_rows(taken.host_errors, "", "")
    return counter("kvstow_errors", "Errors by component and code", [*POOL, "component", "code"], errors)


def _error_rows(errors: Mapping[str, int], *before: str) -> list[Row]:
    return [((*before, _COMPONENTS.get(code, "engine"), code), count) for code, count in errors.items()]


# -- pools ---------------------------------------------------------------------------------------------------------


def pool_families(taken: Snapshots) -> Iterator[Metric]:
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
        joined(by_label(asdict(one.pool.slots), *pool) for pool, one in stats),
    )
    yield gauge("kvstow_leases", "Open leases", POOL, [(pool, one.pool.leases) for pool, one in stats])
    yield counter(
        "kvstow_evicted_bytes",
        "Bytes evicted on one rank, by reason",
        [*POOL, "reason"],
        joined(
            by_label({reason: count * one.pool.slot_bytes for reason, count in one.evictions.items()}, *pool)
            for pool, one in stats
        ),
    )


def curve_families(taken: Snapshots) -> Iterator[Metric]:
    """Without series of pools that have no curve yet."""
    drawn = [(pool.labels, pool.curve) for pool in taken.pools if pool.curve.items]
    ratios: list[Row] = []
    for labels, curve in drawn:
        for size in curve.items:
            times = f"{size.times:.4g}"
            ratios += [((*labels, times, "policy"), size.ratio), ((*labels, times, "lru"), size.lru)]
        ratios.append(((*labels, "inf", "policy"), curve.everything or 0.0))
    yield gauge(
        "kvstow_curve_hit_ratio",
        "Share of the blocks that a pool of so many times the size would have hit, by the order of eviction (inf: one "
        "that never evicts)",
        [*POOL, "times", "order"],
        ratios,
    )
    yield gauge(
        "kvstow_curve_useful_bytes",
        "Size that the curve recommends, on all ranks together: a larger one that is worth its memory, a smaller one "
        "that is enough, or the present one",
        POOL,
        [(labels, (curve.next_useful or curve.enough or curve).num_bytes) for labels, curve in drawn],
    )
    yield gauge(
        "kvstow_curve_requests",
        "Requests that the curve rests on",
        POOL,
        [(labels, curve.requests) for labels, curve in drawn],
    )


# -- ranks ---------------------------------------------------------------------------------------------------------

_SHARED = "memory that all ranks share is that of rank 0"
_PIN_FAILURES = (*PinError.PIN_FAILURES, "internal")


class _RankFamily(NamedTuple):
    """A gauge with one value for the ranks of each number in a pool, or one per item of a mapping, which the label
    `label` then names. `over` combines the values of several engines into one. A value of None gives no series.
    `is_memory`: memory that all ranks share is that of rank 0, so that the sum over the ranks is what the pool
    takes."""

    name: str
    text: str
    over: Callable[[Iterable[float]], float]
    value: Callable[[RankStatus], float | Mapping[str, float] | None]
    label: str | None = None
    is_memory: bool = False


def _chunks(rank: RankStatus) -> Mapping[str, float]:
    pending = max(0, rank.chunks_total - rank.chunks_done - rank.chunks_failed)
    return {"pending": pending, "done": rank.chunks_done, "failed": rank.chunks_failed}


_RANK_FAMILIES = (
    _RankFamily(
        "kvstow_pool_pinned_bytes",
        f"Bytes pinned by the engine with the fewest; {_SHARED}",
        min,
        attrgetter("pinned_bytes"),
        is_memory=True,
    ),
    _RankFamily(
        "kvstow_pool_locked_bytes",
        f"Pinned bytes that are locked in memory, of the engine with the fewest; {_SHARED}",
        min,
        attrgetter("locked_bytes"),
        is_memory=True,
    ),
    _RankFamily(
        "kvstow_pool_resident_bytes",
        f"Bytes resident in memory, of the engine with the fewest; {_SHARED}",
        min,
        attrgetter("resident_bytes"),
        is_memory=True,
    ),
    _RankFamily(
        "kvstow_pool_numa_bytes",
        f"Bytes of the pool by NUMA node, if the kernel reports it; {_SHARED}",
        max,
        attrgetter("numa_bytes"),
        label="numa_node",
        is_memory=True,
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


def rank_families(taken: Snapshots, now: float) -> Iterator[Metric]:
    """`now`: seconds since the epoch."""
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
            (labels, float(not any(rank_failure(rank, pool.hosted.facade.config.report_timeout) for rank in found)))
            for labels, pool, found in ranks
        ],
    )
    of_ranks = [(labels, found) for labels, _, found in ranks]
    of_memory = list(_by_memory(taken))
    for family in _RANK_FAMILIES:
        yield _family_of(family, of_memory if family.is_memory else of_ranks)
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
        f"Configured bytes; {_SHARED}",
        RANK,
        [
            (labels, pool.readiness.capacity_slots * pool.hosted.facade.config.slot_bytes_of(number))
            for labels, number, pool in ranks
            if number == 0 or not pool.hosted.shares_memory
        ],
    )
    counted = [(labels, pool.counted[number]) for labels, number, pool in ranks]
    yield counter(
        "kvstow_pin_failures",
        "Failed attempts to pin",
        [*RANK, "reason"],
        joined(
            by_label({reason: one.pin_failures.get(reason, 0) for reason in _PIN_FAILURES}, *labels)
            for labels, one in counted
        ),
    )
    yield counter(
        "kvstow_transfer_busy_seconds",
        "Time in which the rank was copying, in all engines together",
        [*RANK, "direction"],
        joined(
            by_label({"load": one.load_busy_seconds, "store": one.store_busy_seconds}, *labels)
            for labels, one in counted
        ),
    )


def _by_memory(taken: Snapshots) -> Iterator[tuple[tuple[str, ...], Sequence[RankStatus]]]:
    """The ranks by number, except that ranks which share a pool's memory count together, as rank 0."""
    for pool in taken.pools:
        if pool.hosted.shares_memory and pool.ranks:
            yield (*pool.labels, "0"), [rank for found in pool.ranks.values() for rank in found]
        elif not pool.hosted.shares_memory:
            for number, found in sorted(pool.ranks.items()):
                yield (*pool.labels, str(number)), found


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
