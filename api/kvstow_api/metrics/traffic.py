"""Metric families of what pools do: lookups, transfers, and the ages of blocks. All have the labels `POOL`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric

from kvstow.stats import DIRECTIONS
from kvstow_api.metrics.families import Row, by_label, counter, gauge, histogram, joined
from kvstow_api.metrics.snapshots import POOL, Snapshots

SOURCE = "host"


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


def lookup_families(taken: Snapshots) -> Iterator[Metric]:
    stats = taken.stats()
    yield counter(
        "kvstow_lookups",
        "Lookups by result",
        [*POOL, "result"],
        joined(by_label(one.lookups.results, *values) for values, one in stats),
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
        joined(by_label(one.fallbacks, *values) for values, one in stats),
    )
    yield counter(
        "kvstow_store_blocks",
        "Blocks offered to the pool, by outcome",
        [*POOL, "outcome"],
        joined(by_label(one.stores, *values) for values, one in stats),
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


def age_families(taken: Snapshots) -> Iterator[Metric]:
    for name, text, field in (
        ("lifetime", "Age of blocks that were evicted for capacity", "lifetime"),
        ("idle_before_evict", "Time since the last use of blocks that were evicted for capacity", "idle"),
        ("reuse_gap", "Time since the last use of blocks that a lookup found", "reuse_gap"),
    ):
        rows = [(pool.labels, getattr(pool.stats.ages, field)) for pool in taken.pools]
        yield histogram(f"kvstow_block_{name}_seconds", f"{text}, for one block in 61", POOL, rows)
