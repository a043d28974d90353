"""Metric families of the server: state, memory of the host, checks, operations, HTTP, certificate, build."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client import Metric

from kvstow.stats import EngineState
from kvstow_api.answers import ConditionView
from kvstow_api.directory import Directory
from kvstow_api.health import Health
from kvstow_api.host import ApiHost
from kvstow_api.hostreadiness import host_readiness
from kvstow_api.metrics.families import Row, by_label, counter, gauge, histogram, scalar
from kvstow_api.metrics.snapshots import POOL, Snapshots
from kvstow_api.operations import KINDS, Operations
from kvstow_api.requests import HttpCounters

_STATES: tuple[EngineState, ...] = get_args(EngineState)


def host_families(directory: Directory) -> Iterator[Metric]:
    state = host_readiness(directory).state
    yield gauge(
        "kvstow_state",
        "1 for the present state of the engine, or of the node that engines attach to",
        ["state"],
        [((one,), float(one == state)) for one in _STATES],
    )
    yield counter(
        "kvstow_rejected_connections",
        "Connections of engines that were refused, or ended for what they sent, by reason",
        ["reason"],
        by_label(directory.rejected),
    )


def memory_families(directory: Directory, orphaned_bytes: int | None) -> Iterator[Metric]:
    memory = directory.memory()
    for name, text, value in (
        ("target", "Memory to populate, of all ranks", memory.target_bytes),
        ("populated", "Memory that is populated, of all ranks", memory.populated_bytes),
        ("granted", "Memory that is in pools", memory.granted_bytes),
        ("used", "Memory of slots that are not free", memory.used_bytes),
        ("recalled", "Memory on its way from a pool to others", memory.recalled_bytes),
    ):
        yield gauge(f"kvstow_node_{name}_bytes", text, [], scalar(value))
    yield gauge(
        "kvstow_node_orphaned_bytes",
        "Memory of earlier services that processes still hold, as far as this one sees them; measured once a minute",
        [],
        [] if orphaned_bytes is None else scalar(orphaned_bytes),
    )
    has_keeper = memory.keeper is not None
    yield gauge(
        "kvstow_node_keeper_up",
        "1 while the process is there that holds the memory without a service; absent where there is to be none",
        [],
        scalar(float(memory.keeper == "connected")) if has_keeper else [],
    )
    yield counter(
        "kvstow_node_keeper_restarts",
        "How often a keeper has taken the place of one that was gone, or has come back",
        [],
        scalar(memory.keeper_restarts) if has_keeper else [],
    )


def condition_family(conditions: Sequence[ConditionView], models: Mapping[str, str]) -> Metric:
    """`models`: those of the pools, by name. No label names a session or a rank, because they come and go."""
    counts = Counter((one.name, one.severity, one.pool or "", models.get(one.pool or "", "")) for one in conditions)
    return gauge(
        "kvstow_condition",
        "Conditions that `kvstow doctor` tells, by name and severity; absent while there is none",
        ["condition", "severity", *POOL],
        [(labels, float(count)) for labels, count in counts.items()],
    )


def readiness_families(health: Health) -> Iterator[Metric]:
    verdicts = [probe.run() for probe in health.probes.values()]
    ready = next(verdict.ok for verdict in verdicts if verdict.probe == "readyz")
    yield gauge("kvstow_ready", "1 while /readyz answers 200", [], scalar(float(ready)))
    yield gauge(
        "kvstow_health_check",
        "1 while the check passes",
        ["check", "probe"],
        [
            ((finding.name, verdict.probe), float(finding.failure is None))
            for verdict in verdicts
            for finding in verdict.findings
        ],
    )


def operation_families(operations: Operations) -> Iterator[Metric]:
    yield gauge(
        "kvstow_operations_inflight",
        "Operations in progress",
        ["kind"],
        [((kind,), operations.num_running(kind)) for kind in KINDS],
    )
    yield counter("kvstow_operations", "Operations that ended", ["kind", "result"], operations.ended().items())
    yield histogram(
        "kvstow_operation_duration_seconds",
        "Duration of an operation",
        ["kind"],
        [((kind,), snapshot) for kind, snapshot in operations.seconds().items()],
    )


def http_families(http: HttpCounters) -> Iterator[Metric]:
    yield counter(
        "kvstow_http_requests",
        "HTTP requests by response status",
        ["method", "route", "code"],
        [((*key, str(status)), count) for key, status, count in http.requests()],
    )
    yield histogram(
        "kvstow_http_request_duration_seconds",
        "Duration of an HTTP request",
        ["method", "route"],
        http.seconds(),
    )
    yield gauge("kvstow_http_requests_inflight", "HTTP requests in progress", [], scalar(http.inflight))


def certificate_families(host: ApiHost) -> Iterator[Metric]:
    yield gauge(
        "kvstow_tls_certificate_expiry_timestamp_seconds",
        "Expiry of the admin server's certificate, if it uses TLS",
        [],
        scalar(host.certificate_ends()) if host.certificate_ends else [],
    )


def fact_families(host: ApiHost, taken: Snapshots) -> Iterator[Metric]:
    build = {"version": host.version, "python": platform.python_version(), "mode": host.mode, **host.build}
    yield gauge("kvstow_build_info", "Versions in the labels; always 1", list(build), [(list(build.values()), 1)])
    names = ("slot_bytes", "block_tokens", "num_ranks", "policy")
    rows: list[Row] = []
    for pool in taken.pools:
        config = pool.hosted.facade.config
        values = (
            str(config.slot_bytes),
            "" if config.block_tokens is None else str(config.block_tokens),
            str(config.num_ranks),
            pool.stats.pool.policy,
        )
        rows.append(((*pool.labels, *values), 1))
    yield gauge("kvstow_config_info", "Settings in the labels; always 1", [*POOL, *names], rows)
