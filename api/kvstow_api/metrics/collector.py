"""The collector of one application's metrics, and the families of its server and its fleet tier.

Those of the tier have the labels `TIER`: of each pool, all its namespaces together. There are none without a store.
Counters include what namespaces counted before they ended: an engine that resets its cache begins another one.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client import Metric
from prometheus_client.registry import Collector as BaseCollector

from kvstow.stats import EngineState
from kvstow.status import RankStatus, SessionState
from kvstow.tier.tierstatus import TierCounters, TierStatus
from kvstow_api.answers import ConditionView
from kvstow_api.appstate import AppState
from kvstow_api.directory import Directory, TierLabels
from kvstow_api.health import Health
from kvstow_api.host import ApiHost
from kvstow_api.hostreadiness import host_readiness
from kvstow_api.metrics.families import Row, by_label, counter, gauge, histogram, scalar
from kvstow_api.metrics.pools import (
    POOL,
    PoolSnapshot,
    Snapshots,
    counter_families,
    curve_families,
    error_family,
    exposed,
    pool_families,
    rank_families,
    token_families,
    transfer_families,
)
from kvstow_api.operations import KINDS, Operations
from kvstow_api.readings import curve_view
from kvstow_api.requests import HttpCounters
from kvstow_api.sampler import Sampler


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
        taken = _snapshots(app.directory, app.sampler)
        yield from pool_families(taken)
        yield from curve_families(taken)
        yield from rank_families(taken, time.time())
        yield from counter_families(taken)
        yield from transfer_families(taken)
        yield from token_families(taken)
        yield error_family(taken)
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


def _snapshots(directory: Directory, sampler: Sampler) -> Snapshots:
    """Of all pools at about the same time."""
    hosted, sessions = directory.pools(), directory.sessions()
    counters = sampler.rank_counters
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
            curve=curve_view(sampler, pool),
        )
        for pool in hosted
    ]
    return Snapshots(pools, directory.errors)


# -- the server ----------------------------------------------------------------------------------------------------

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


# -- the fleet tier ------------------------------------------------------------------------------------------------

TIER = ("tier", *POOL)
"""The labels of a pool's tier: the name of the store, the pool, and its model."""

_Values = Sequence[TierStatus]

_GAUGES: tuple[tuple[str, str, Callable[[_Values], float | None]], ...] = (
    (
        "kvstow_tier_up",
        "1 while the tier is on and its breaker closed; 0 also while it is off",
        lambda tiers: float({"on"} <= {one.state for one in tiers} <= {"on", "off"}),
    ),
    (
        "kvstow_tier_breaker_open",
        "1 while the store is left alone because it does not work",
        lambda tiers: float(any(one.breaker != "closed" for one in tiers)),
    ),
    ("kvstow_tier_waiting_blocks", "Blocks that are to be put", lambda tiers: _sum(tiers, "waiting_blocks")),
    ("kvstow_tier_putting_blocks", "Blocks that are being put", lambda tiers: _sum(tiers, "putting_blocks")),
    ("kvstow_tier_fetching_blocks", "Blocks that are being fetched", lambda tiers: _sum(tiers, "fetching_blocks")),
    (
        "kvstow_tier_fetch_bytes_per_second",
        "Measured rate of fetches, on the slowest rank; absent until it is measured",
        lambda tiers: min(_known(one.fetch_bytes_per_second for one in tiers), default=None),
    ),
    (
        "kvstow_tier_lookup_seconds",
        "Measured time of a question to the store; absent until it is measured",
        lambda tiers: max(_known(one.lookup_seconds for one in tiers), default=None),
    ),
    (
        "kvstow_tier_prefill_tokens_per_second",
        "Measured speed of computing prompts; absent until it is measured",
        lambda tiers: min(_known(one.prefill_tokens_per_second for one in tiers), default=None),
    ),
)
_COUNTERS = [(one, source.read) for one, _, source in exposed(TierCounters)]


def tier_families(directory: Directory) -> Iterator[Metric]:
    if directory.tier is None:
        return
    tiers: dict[TierLabels, list[TierStatus]] = {}
    for hosted in directory.tier.tiers():
        tiers.setdefault((hosted.store, hosted.pool, hosted.model), []).append(hosted)
    if not tiers:
        return
    totals = directory.tier.totals()
    for name, text, value in _GAUGES:
        figures = [(labels, value(of_pool)) for labels, of_pool in tiers.items()]
        yield gauge(name, text, TIER, [(labels, figure) for labels, figure in figures if figure is not None])
    for one, read in _COUNTERS:
        yield counter(f"kvstow_{one.name}", one.text, TIER, [(at, read(counted)) for at, counted in totals.items()])
    yield counter(
        "kvstow_tier_failed_blocks",
        "Blocks that could not be moved",
        [*TIER, "direction"],
        [
            ((*labels, direction), getattr(one, f"failed_{direction}_blocks"))
            for labels, one in totals.items()
            for direction in ("put", "fetch")
        ],
    )
    for name, text, field in (
        ("corrupt_objects", "Objects that were fetched and were not what was put", "corrupt_objects"),
        ("client_restarts", "How often what connects to the store was ended and started again", "restarts"),
    ):
        found = [
            (labels, sum(getattr(client.stats, field) for one in of_pool for client in one.clients))
            for labels, of_pool in tiers.items()
        ]
        yield counter(f"kvstow_tier_{name}", text, TIER, found)


def _sum(tiers: _Values, field: str) -> float:
    return float(sum(getattr(one, field) for one in tiers))


def _known(figures: Iterable[float | None]) -> list[float]:
    return [figure for figure in figures if figure is not None]
