"""Metric families of the faults of pools, with the labels `POOL`. A new fault is one line of `_FAULTS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Metric

from kvstow_api.metrics.families import Row, counter, joined
from kvstow_api.metrics.snapshots import POOL, Snapshots

_COMPONENTS = {"admin_server": "admin_server", "rank_report": "connector"}
"""The failed component, by error code; the engine for all other codes."""
_FAULTS = {
    "rank_restarts": "Ranks that restarted without their memory",
    "stale_reports": "Reports that arrived after a newer one",
    "stale_completions": "Completions of ops that had already ended",
    "duplicate_completions": "Completions received twice",
}
"""Help of the counters of `FaultStats`, by field."""


def fault_families(taken: Snapshots) -> Iterator[Metric]:
    stats = taken.stats()
    errors = joined(_error_rows(one.faults.errors, *values) for values, one in stats)
    errors += _error_rows(taken.host_errors, "", "")
    yield counter("kvstow_errors", "Errors by component and code", [*POOL, "component", "code"], errors)
    for field, text in _FAULTS.items():
        rows = [(values, getattr(one.faults, field)) for values, one in stats]
        yield counter(f"kvstow_{field}", text, POOL, rows)


def _error_rows(errors: Mapping[str, int], *before: str) -> list[Row]:
    return [((*before, _COMPONENTS.get(code, "engine"), code), count) for code, count in errors.items()]
