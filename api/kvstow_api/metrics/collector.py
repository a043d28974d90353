"""The collector of one application's metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector as BaseCollector

from kvstow_api.appstate import AppState
from kvstow_api.metrics.engine import engine_families
from kvstow_api.metrics.families import counter, histogram
from kvstow_api.metrics.server import (
    certificate_families,
    fact_families,
    http_families,
    operation_families,
    readiness_families,
)


class Collector(BaseCollector):
    """Reads snapshots at scrape time. O(ranks + routes), whatever the size of the pool.

    All series exist from the first scrape on, except those of HTTP requests.
    """

    def __init__(self, app: AppState) -> None:
        self._app = app

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        app = self._app
        engine = app.engine
        stats, readiness = engine.stats(), engine.readiness()
        yield from engine_families(stats, readiness, time.time())
        yield from readiness_families(app.health, readiness, engine.config.report_timeout)
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
        yield from fact_families(app.host)
