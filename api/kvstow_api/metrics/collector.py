"""The collector of one application's metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector as BaseCollector

from kvstow.status import RankStatus
from kvstow_api.appstate import AppState
from kvstow_api.directory import Directory
from kvstow_api.hostreadiness import live_sessions
from kvstow_api.metrics.engine import PoolSnapshot, Snapshots, engine_families
from kvstow_api.metrics.families import counter, histogram
from kvstow_api.metrics.server import (
    certificate_families,
    fact_families,
    host_families,
    http_families,
    operation_families,
    readiness_families,
)


class Collector(BaseCollector):
    """Reads snapshots at scrape time. O(pools + ranks + routes), whatever the size of the pools.

    All series of a pool exist from its first scrape on, except those of HTTP requests.
    """

    def __init__(self, app: AppState) -> None:
        self._app = app

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        app = self._app
        taken = _snapshots(app.directory)
        yield from engine_families(taken, time.time())
        yield from host_families(app.directory, taken)
        yield from readiness_families(app.health, taken)
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


def _snapshots(directory: Directory) -> Snapshots:
    """Of all pools at about the same time."""
    ranks: dict[str, dict[str, tuple[RankStatus, ...]]] = {}
    if directory.is_node:
        for session in live_sessions(directory):
            ranks.setdefault(session.pool, {})[session.session_id] = session.status.ranks
    pools = []
    for pool in directory.pools():
        readiness = pool.facade.readiness()
        sessions = ranks.get(pool.name, {}) if directory.is_node else {directory.engine_id: readiness.ranks}
        pools.append(PoolSnapshot(pool, pool.facade.stats(), readiness, sessions))
    return Snapshots(pools, directory.is_node, directory.errors)
