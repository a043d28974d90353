"""Metric families of pools: slots, blocks, memory, leases, evictions. All have the labels `POOL`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client import Metric

from kvstow.status import SESSION_STATES
from kvstow_api.metrics.families import by_label, counter, gauge, joined
from kvstow_api.metrics.snapshots import POOL, Snapshots


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
        "kvstow_allocation_failures",
        "Stores that did not find room for all their blocks",
        POOL,
        [(pool, one.allocation_failures) for pool, one in stats],
    )
    yield counter(
        "kvstow_evicted_blocks",
        "Evicted blocks by reason",
        [*POOL, "reason"],
        joined(by_label(one.evictions, *pool) for pool, one in stats),
    )
    yield counter(
        "kvstow_evicted_bytes",
        "Bytes evicted on one rank, by reason",
        [*POOL, "reason"],
        joined(
            by_label({reason: count * one.pool.slot_bytes for reason, count in one.evictions.items()}, *pool)
            for pool, one in stats
        ),
    )
