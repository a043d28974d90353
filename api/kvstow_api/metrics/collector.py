"""The collector of one application's metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector as BaseCollector

from kvstow.status import RankStatus, SessionState
from kvstow_api.appstate import AppState
from kvstow_api.directory import Directory
from kvstow_api.metrics.families import counter, histogram
from kvstow_api.metrics.faults import fault_families
from kvstow_api.metrics.pools import pool_families
from kvstow_api.metrics.ranks import rank_families
from kvstow_api.metrics.server import (
    certificate_families,
    condition_family,
    fact_families,
    host_families,
    http_families,
    memory_families,
    operation_families,
    readiness_families,
)
from kvstow_api.metrics.snapshots import PoolSnapshot, Snapshots
from kvstow_api.metrics.tier import tier_families
from kvstow_api.metrics.traffic import age_families, lookup_families, transfer_families
from kvstow_api.rankcounters import RankCounters


class Collector(BaseCollector):
    """Reads snapshots at scrape time. O(pools + sessions + ranks + routes), whatever the size of the pools.

    All series of a pool exist from its first scrape on, except those that only a rank that has reported has. They end
    with the pool: Prometheus marks them stale at the next scrape. A pool that is made later under the same name counts
    from zero, which is a reset of its counters like any other. No label names a session: engines come and go, and each
    would leave its series behind.
    """

    def __init__(self, app: AppState) -> None:
        self._app = app

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        app = self._app
        taken = _snapshots(app.directory, app.sampler.rank_counters)
        yield from pool_families(taken)
        yield from rank_families(taken, time.time())
        yield from transfer_families(taken)
        yield from age_families(taken)
        yield from lookup_families(taken)
        yield from fault_families(taken)
        yield from tier_families(app.directory)
        yield from host_families(app.directory)
        yield from memory_families(app.directory, app.watch.measured.orphaned_bytes)
        yield from readiness_families(app.health)
        yield condition_family(
            app.conditions.find().conditions, {pool.name: pool.model for pool in app.directory.pools()}
        )
        yield from operation_families(app.operations)
        yield from http_families(app.http)
        yield histogram("kvstow_event_loop_lag_seconds", "Lag of the event loop", [], [((), app.loop.snapshot())])
        yield counter(
            "kvstow_events_dropped",
            "Events that slow readers missed",
            ["sink"],
            [(("sse",), app.streams.lost)],
        )
        yield from certificate_families(app.host)
        yield from fact_families(app.host, taken)


def _snapshots(directory: Directory, counters: RankCounters) -> Snapshots:
    """Of all pools at about the same time."""
    hosted, sessions = directory.pools(), directory.sessions()
    counters.note(hosted, sessions)
    ranks: dict[str, dict[int, list[RankStatus]]] = {}
    states: dict[str, Counter[SessionState]] = {}
    for session in sessions:
        states.setdefault(session.pool, Counter())[session.state] += 1
        if session.state != "lost":
            of_pool = ranks.setdefault(session.pool, {})
            for rank in session.ranks:
                of_pool.setdefault(rank.rank, []).append(rank)
    pools = [
        PoolSnapshot(
            hosted=pool,
            stats=pool.facade.stats(),
            readiness=pool.facade.readiness(),
            ranks=ranks.get(pool.name, {}),
            counted=counters.of_pool(pool),
            session_states=states.get(pool.name, Counter()),
        )
        for pool in hosted
    ]
    return Snapshots(pools, directory.errors)
