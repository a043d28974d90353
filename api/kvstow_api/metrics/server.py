"""Metric families of the server: readiness, checks, operations, HTTP, certificate, build."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from prometheus_client import Metric

from kvstow.status import Readiness
from kvstow_api.health import Health, rank_failure
from kvstow_api.host import ApiHost
from kvstow_api.metrics.families import counter, gauge, histogram, scalar
from kvstow_api.operations import KINDS, Operations
from kvstow_api.requests import HttpCounters


def readiness_families(health: Health, readiness: Readiness, report_timeout: float) -> Iterator[Metric]:
    verdicts = [probe.run() for probe in health.probes.values()]
    ready = next(verdict.ok for verdict in verdicts if verdict.probe == "readyz")
    yield gauge("kvstow_ready", "1 while /readyz answers 200", [], scalar(float(ready)))
    yield gauge(
        "kvstow_rank_ready",
        "1 while the rank reports and can copy",
        ["rank"],
        [((str(rank.rank),), float(rank_failure(rank, report_timeout) is None)) for rank in readiness.ranks],
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


def fact_families(host: ApiHost) -> Iterator[Metric]:
    build = {"version": host.version, "python": platform.python_version(), "mode": host.mode, **host.build}
    yield gauge("kvstow_build_info", "Versions in the labels; always 1", list(build), [(list(build.values()), 1)])
    facade = host.directory.pools()[0].facade
    config = facade.config
    facts = {
        "model_name": str(host.settings.get("model", "")),
        "slot_bytes": str(config.slot_bytes),
        "block_tokens": "" if config.block_tokens is None else str(config.block_tokens),
        "num_ranks": str(config.num_ranks),
        "policy": facade.stats().pool.policy,
    }
    yield gauge("kvstow_config_info", "Settings in the labels; always 1", list(facts), [(list(facts.values()), 1)])
