"""Metric families of the server: readiness, checks, operations, HTTP, certificate, build."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator
from typing import get_args

from prometheus_client import Metric

from kvstow.stats import EngineState
from kvstow.status import SessionState
from kvstow_api.directory import Directory
from kvstow_api.health import Health
from kvstow_api.host import ApiHost
from kvstow_api.hostreadiness import host_readiness
from kvstow_api.metrics.engine import Snapshots
from kvstow_api.metrics.families import Row, counter, gauge, histogram, scalar
from kvstow_api.operations import KINDS, Operations
from kvstow_api.readychecks import rank_failure
from kvstow_api.requests import HttpCounters

_STATES: tuple[EngineState, ...] = get_args(EngineState)
_SESSION_STATES: tuple[SessionState, ...] = get_args(SessionState)


def host_families(directory: Directory, taken: Snapshots) -> Iterator[Metric]:
    memory = directory.memory()
    state = host_readiness(directory).state if taken.is_node else taken.pools[0].readiness.state
    yield gauge(
        "kvstow_node_populated_bytes", "Memory that is populated, of all ranks", [], scalar(memory.populated_bytes)
    )
    yield gauge("kvstow_node_target_bytes", "Memory to populate, of all ranks", [], scalar(memory.target_bytes))
    sessions = Counter(session.status.state for session in directory.sessions())
    yield gauge("kvstow_sessions", "Engines by state", ["state"], [((one,), sessions[one]) for one in _SESSION_STATES])
    yield gauge(
        "kvstow_state",
        "1 for the present state of the engine, or of the node that engines attach to",
        ["state"],
        [((one,), float(one == state)) for one in _STATES],
    )


def readiness_families(health: Health, taken: Snapshots) -> Iterator[Metric]:
    verdicts = [probe.run() for probe in health.probes.values()]
    ready = next(verdict.ok for verdict in verdicts if verdict.probe == "readyz")
    yield gauge("kvstow_ready", "1 while /readyz answers 200", [], scalar(float(ready)))
    yield gauge(
        "kvstow_rank_ready",
        "1 while the rank reports and can copy",
        [*taken.session_labels, "rank"],
        [
            ((*labels, str(rank.rank)), float(rank_failure(rank, pool.hosted.facade.config.report_timeout) is None))
            for labels, pool, rank in taken.ranks()
        ],
    )
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
    names = ("model_name", "slot_bytes", "block_tokens", "num_ranks", "policy")
    rows: list[Row] = []
    for pool in taken.pools:
        config = pool.hosted.facade.config
        values = (
            str(host.settings.get("model", "")) or pool.hosted.model,
            str(config.slot_bytes),
            "" if config.block_tokens is None else str(config.block_tokens),
            str(config.num_ranks),
            pool.stats.pool.policy,
        )
        rows.append(((pool.name, *values) if taken.is_node else values, 1))
    yield gauge("kvstow_config_info", "Settings in the labels; always 1", [*taken.pool_label, *names], rows)
