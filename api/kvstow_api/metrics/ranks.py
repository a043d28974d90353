"""Metric families of the ranks of a pool. All have the labels `RANK`.

A new figure of a rank is one line of `_RANK_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from prometheus_client import Metric

from kvstow.errors import PinError
from kvstow.status import RankStatus
from kvstow_api.conditions.engine import rank_failure
from kvstow_api.metrics.families import Row, by_label, counter, gauge, joined
from kvstow_api.metrics.snapshots import RANK, Snapshots

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
