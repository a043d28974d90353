"""Metrics, computed from snapshots when they are scraped. Tables have the families, each with a function that reads it.

A new counter of `kvstow.stats` becomes a metric by itself. A new figure of a rank is a row of `_OF_RANKS`. A scrape of
8 ranks takes 5 to 7 ms of CPU, half of it for prometheus_client's text. Its Counter and Gauge are not used: with
PROMETHEUS_MULTIPROC_DIR set, as in vLLM, they would write into the inference engine's own files.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from prometheus_client import Metric
from prometheus_client.registry import Collector as BaseCollector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from kvstow.errors import PinError
from kvstow.messages import LayerWay
from kvstow.stats import DIRECTIONS, Counters, DirectionStats, EngineState, EngineStats, Exposed, Histogram
from kvstow.status import SESSION_STATES, NamespaceStatus, RankStatus, Readiness, SessionState
from kvstow.tier.blockstore import StorePart
from kvstow.tier.tierstatus import TierCounters, TierStatus
from kvstow_api.answers import PoolCurveView
from kvstow_api.appstate import AppState
from kvstow_api.conditions.evidence import Evidence
from kvstow_api.conditions.pools import rank_failure
from kvstow_api.conditions.table import failures_of, find_conditions
from kvstow_api.directory import HostedPool, HostTier, TierLabels
from kvstow_api.operations import KINDS
from kvstow_api.readings import session_states

POOL = ("pool", "model")
"""The labels of a pool: its name, and its model, which is empty if unknown."""
RANK = (*POOL, "rank")
TIER = ("tier", *POOL)
"""The labels of a pool's use of the store below it: the name of the store, the pool, and its model."""
PART = ("tier", "part")

_Over = Callable[[Iterable[float]], float]


class Family(NamedTuple):
    """A family of series. `read` returns the value of a subject, such as a pool, or None for no series. With `labels`,
    it returns a mapping instead, whose keys are one text or a tuple of texts for these labels. For families of ranks,
    `over` combines the values of several engines into one."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    text: str
    read: Callable[[Any], Any]
    labels: tuple[str, ...] = ()
    over: _Over = sum

    def of(self, names: Iterable[str], subjects: Iterable[tuple[Sequence[str], Any]]) -> Metric:
        """Make the metric. `names` are the labels whose values come with each of `subjects`."""
        names, rows = (*names, *self.labels), list[tuple[Sequence[str], float | Histogram | None]]()
        for values, subject in subjects:
            found = self.read(subject)
            if isinstance(found, Mapping):
                rows += [((*values, *((at,) if isinstance(at, str) else at)), one) for at, one in found.items()]
            else:
                rows.append((values, found))
        metric = Metric(f"kvstow_{self.name}", self.text, self.kind)
        for values, value in rows:
            if value is not None:
                metric.samples += self._samples(dict(zip(names, values, strict=True)), value)
        return metric

    def _samples(self, labels: dict[str, str], value: float | Histogram) -> list[Sample]:
        name = f"kvstow_{self.name}"
        if not isinstance(value, Histogram):
            return [Sample(f"{name}_total" if self.kind == "counter" else name, labels, value)]
        counts = list(accumulate(value.counts))
        ends = (*map(floatToGoString, value.bounds), "+Inf")
        buckets = [
            Sample(f"{name}_bucket", {**labels, "le": end}, count) for end, count in zip(ends, counts, strict=True)
        ]
        return [*buckets, Sample(f"{name}_count", labels, counts[-1]), Sample(f"{name}_sum", labels, value.sum)]


_Read = str | Callable[[Any], Any]


def gauge(name: str, text: str, read: _Read, labels: tuple[str, ...] = (), over: _Over = sum) -> Family:
    """Make a gauge. `read` may also be the path of an attribute."""
    return Family("gauge", name, text, attrgetter(read) if isinstance(read, str) else read, labels, over)


def counter(name: str, text: str, read: _Read, labels: tuple[str, ...] = ()) -> Family:
    return gauge(name, text, read, labels)._replace(kind="counter")


# -- pools ------------------------------------------------------------------------------------------------------------


class PoolSnapshot(NamedTuple):
    """A pool at the time of a scrape. `ranks` are those of all its live engines, by rank number. `counted` are the
    counts of the ranks of each number in all its engines, including those that have ended."""

    hosted: HostedPool
    stats: EngineStats
    readiness: Readiness
    ranks: Mapping[int, Sequence[RankStatus]]
    counted: Sequence[Mapping[str, float]]
    session_states: Mapping[SessionState, int]
    curve: PoolCurveView

    @property
    def labels(self) -> tuple[str, str]:
        return self.hosted.name, self.hosted.model

    def tokens(self, blocks: int) -> int | None:
        """Return the number of tokens, or None while the number of tokens in a block is unknown."""
        return None if self.stats.block_tokens is None else blocks * self.stats.block_tokens


def _exposed(
    kind: type, path: str = "", labels: tuple[str, ...] = ()
) -> Iterator[tuple[Exposed, Any, tuple[str, ...]]]:
    """Yield what this dataclass and those within it expose, how it is read, and the direction that it belongs to."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        found = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Exposed)]
        if found:
            yield found[0], attrgetter(path + name), labels
        elif is_dataclass(hint):
            inner = hint if isinstance(hint, type) else type(hint)
            yield from _exposed(inner, f"{path}{name}.", (name,) if inner is DirectionStats else labels)


def _counters(kind: type) -> Iterator[Family]:
    places: dict[Exposed, dict[tuple[str, ...], Callable[[Any], Any]]] = {}
    for one, read, labels in _exposed(kind):
        places.setdefault(one, {})[labels] = read
    for one, reads in places.items():
        is_histogram = isinstance(reads[next(iter(reads))](kind()), Histogram)
        labels = ("direction",) if () not in reads else (one.label,) if one.label else ()
        yield Family(
            "histogram" if is_histogram else "counter",
            one.name,
            one.text,
            reads[()] if () in reads else partial(_by_direction, reads),
            labels,
        )


def _by_direction(reads: Mapping[tuple[str, ...], Callable[[Any], Any]], counters: Any) -> Mapping[Any, Any]:
    return {labels: read(counters) for labels, read in reads.items()}


def _curve_ratios(pool: PoolSnapshot) -> Mapping[tuple[str], float]:
    return {(f"{size.times:.4g}",): size.ratio for size in pool.curve.items}


def _settings(pool: PoolSnapshot) -> Mapping[tuple[str, ...], float]:
    config = pool.hosted.facade.config
    tokens = "" if config.block_tokens is None else str(config.block_tokens)
    return {(str(config.slot_bytes), tokens, str(config.num_ranks), pool.stats.pool.policy): 1}


_ENGINE_COUNTERS = tuple(_counters(Counters))
_OF_POOLS = (
    gauge("pool_capacity_blocks", "Configured slots, the same on every rank", "stats.pool.capacity_slots"),
    gauge("pool_usable_blocks", "Slots that the pool can use on every rank", "stats.pool.usable_slots"),
    gauge("pool_block_bytes", "Size of a slot on one rank", "stats.pool.slot_bytes"),
    gauge(
        "pool_granted_bytes", "What the pool has of the host's memory, on all ranks together", "hosted.granted_bytes"
    ),
    gauge(
        "pool_due_bytes",
        "What the pool should have: as much as it has use for, up to its fair share",
        "hosted.due_bytes",
    ),
    gauge(
        "sessions",
        "Engines that use the pool, by state",
        lambda pool: {state: pool.session_states[state] for state in SESSION_STATES},
        ("state",),
    ),
    gauge("pool_blocks", "Usable slots of one rank by state", lambda pool: asdict(pool.stats.pool.slots), ("state",)),
    gauge("leases", "Open leases", "stats.pool.leases"),
    counter(
        "evicted_bytes",
        "Bytes evicted on one rank, by reason",
        lambda pool: {name: count * pool.stats.pool.slot_bytes for name, count in pool.stats.evictions.items()},
        ("reason",),
    ),
    gauge(
        "curve_hit_ratio",
        "Share of the blocks that a pool of this many times the size would have hit",
        _curve_ratios,
        ("times",),
    ),
    gauge(
        "curve_useful_bytes",
        "Size that the curve recommends, on all ranks together: a larger one that is worth its memory, a smaller one "
        "that is enough, or the present one",
        lambda pool: (
            (pool.curve.next_useful or pool.curve.enough or pool.curve).num_bytes if pool.curve.items else None
        ),
    ),
    gauge(
        "curve_requests",
        "Requests that the curve rests on",
        lambda pool: pool.curve.requests if pool.curve.items else None,
    ),
    gauge(
        "transfers_inflight",
        "Ops that some rank has not finished",
        lambda pool: {"load": pool.stats.transfers.pending.loads, "store": pool.stats.transfers.pending.stores},
        ("direction",),
    ),
    gauge(
        "transfer_inflight_bytes",
        "Bytes of these ops on one rank",
        lambda pool: {
            "load": pool.stats.transfers.pending.load_bytes,
            "store": pool.stats.transfers.pending.store_bytes,
        },
        ("direction",),
    ),
    gauge("transfers_stuck", "Ops older than the transfer timeout", "stats.transfers.pending.stuck"),
    gauge("transfer_oldest_seconds", "Age of the oldest op", "stats.transfers.pending.oldest_seconds"),
    counter(
        "transfers",
        "Ops that ended, by result",
        lambda pool: {
            (name, result): getattr(pool.stats.transfers.of(name), result)
            for name in DIRECTIONS
            for result in ("ok", "error")
        },
        ("direction", "result"),
    ),
    counter(
        "loads_begun",
        "Loads that began, by their way (layer: within the step that computes with it; async: before it) and why",
        lambda pool: {tuple(name.split("_", 1)): count for name, count in pool.stats.transfers.choices.items()},
        ("path", "reason"),
    ),
    counter(
        "query_tokens", "Tokens of the blocks looked up", lambda pool: pool.tokens(pool.stats.lookups.query_blocks)
    ),
    counter(
        "hit_tokens", "Tokens found", lambda pool: {"host": pool.tokens(pool.stats.lookups.hit_blocks)}, ("source",)
    ),
    counter(
        "miss_tokens",
        "Tokens not found, or not loaded, by reason",
        lambda pool: {reason: pool.tokens(count) for reason, count in pool.stats.lookups.miss_blocks.items()},
        ("reason",),
    ),
    gauge(
        "config_info",
        "Settings in the labels; always 1",
        _settings,
        ("slot_bytes", "block_tokens", "num_ranks", "policy"),
    ),
)
_COMPONENTS = {"admin_server": "admin_server", "rank_report": "connector"}
"""The component that has failed, by error code. For all other codes it is the engine."""
_ERRORS = counter(
    "errors",
    "Errors by component and code",
    lambda errors: {(_COMPONENTS.get(code, "engine"), code): count for code, count in errors.items()},
    ("component", "code"),
)


# -- ranks ------------------------------------------------------------------------------------------------------------

_SHARED = "memory that all ranks share is that of rank 0"
_PIN_FAILURES = (*PinError.PIN_FAILURES, "internal")


def _chunks(rank: RankStatus) -> Mapping[str, float]:
    pending = max(0, rank.chunks_total - rank.chunks_done - rank.chunks_failed)
    return {"pending": pending, "done": rank.chunks_done, "failed": rank.chunks_failed}


def _layer_rates(rank: RankStatus) -> Mapping[str, float]:
    rates = {"kernel": rank.layer_kernel_bytes_per_second, "engine": rank.layer_engine_bytes_per_second}
    return {way: rate for way, rate in rates.items() if rate is not None}


_OF_MEMORY = (
    gauge("pool_pinned_bytes", f"Bytes pinned by the engine with the fewest; {_SHARED}", "pinned_bytes", over=min),
    gauge(
        "pool_locked_bytes",
        f"Pinned bytes that are locked in memory, of the engine with the fewest; {_SHARED}",
        "locked_bytes",
        over=min,
    ),
    gauge(
        "pool_resident_bytes",
        f"Bytes resident in memory, of the engine with the fewest; {_SHARED}",
        "resident_bytes",
        over=min,
    ),
    gauge(
        "pool_numa_bytes",
        f"Bytes of the pool by NUMA node, if the kernel reports it; {_SHARED}",
        "numa_bytes",
        ("numa_node",),
        max,
    ),
)
"""Families of ranks, too. Ranks that share the pool's memory are shown together, as rank 0, so that the sum over the
ranks is the memory of the pool."""
_OF_RANKS = (
    gauge(
        "pin_progress_ratio",
        "Pinned share of the bytes to pin, 0 to 1, of the engine with the least",
        lambda rank: rank.pinned_bytes / rank.target_bytes if rank.target_bytes else 0.0,
        over=min,
    ),
    gauge(
        "pin_elapsed_seconds", "Time spent pinning, of the engine that took longest", "pin_elapsed_seconds", over=max
    ),
    gauge(
        "pin_rate_bytes_per_second",
        "Bytes pinned by the current or latest growth of the pool, divided by its duration, of the slowest engine",
        "pin_rate_bytes_per_second",
        over=min,
    ),
    gauge(
        "layer_read_bytes_per_second",
        "How fast loads by layer can come, by the kernel that reads host memory and by the copy engine, of the fastest "
        "engine; absent until it is measured",
        _layer_rates,
        ("way",),
        max,
    ),
    gauge(
        "layer_ways",
        "Engines whose loads by layer come by the kernel, or by the copy engine",
        lambda rank: {way: float(way == rank.layer_way) for way in get_args(LayerWay)} if rank.layer_way else {},
        ("way",),
    ),
    gauge("pin_chunks", "Chunks of memory to pin, by state", _chunks, ("state",)),
    gauge("rank_pending_ops", "Ops that the rank has not finished", "pending_ops"),
    gauge(
        "transfer_queue_depth",
        "Ops on the rank that wait behind others of their direction",
        lambda rank: {"load": rank.queued_loads, "store": rank.queued_stores},
        ("direction",),
    ),
    gauge(
        "rank_heartbeat_timestamp_seconds",
        "Time of the rank's last report, of the engine that is silent longest; 0 if there was none",
        lambda rank: 0.0 if rank.last_report_age_seconds is None else time.time() - rank.last_report_age_seconds,
        over=min,
    ),
)
_COUNTED = (
    counter(
        "pin_failures",
        "Failed attempts to pin",
        lambda counted: {reason: counted.get(reason, 0) for reason in _PIN_FAILURES},
        ("reason",),
    ),
    counter(
        "transfer_busy_seconds",
        "Time in which the rank was copying, in all engines together",
        lambda counted: {name: counted.get(name, 0.0) for name in DIRECTIONS},
        ("direction",),
    ),
)
"""Families of all configured ranks, also of pools that no engine uses."""
_READY = gauge("rank_ready", "1 while the rank reports and can copy, in all engines", float)
_CAPACITY = gauge("pool_capacity_bytes", f"Configured bytes; {_SHARED}", float)


def _over(family: Family, ranks: Sequence[RankStatus]) -> Any:
    found = [value for value in map(family.read, ranks) if value is not None]
    if not family.labels:
        return family.over(found) if found else None
    return {name: family.over(one.get(name, 0) for one in found) for name in dict.fromkeys(chain.from_iterable(found))}


def _rank_metrics(pools: Sequence[PoolSnapshot]) -> Iterator[Metric]:
    of_ranks, of_memory, ready, capacity, counted = [], [], [], [], []
    for pool in pools:
        config, is_shared = pool.hosted.facade.config, pool.hosted.shares_memory
        for number, found in sorted(pool.ranks.items()):
            of_ranks.append(((*pool.labels, str(number)), found))
            fails = any(rank_failure(rank, config.report_timeout) for rank in found)
            ready.append(((*pool.labels, str(number)), not fails))
        if not is_shared:
            of_memory += of_ranks[len(of_ranks) - len(pool.ranks) :]
        elif pool.ranks:
            of_memory.append(((*pool.labels, "0"), list(chain.from_iterable(pool.ranks.values()))))
        for number in range(config.num_ranks):
            labels = (*pool.labels, str(number))
            counted.append((labels, pool.counted[number]))
            if number == 0 or not is_shared:
                capacity.append((labels, pool.readiness.capacity_slots * config.slot_bytes_of(number)))
    for families, subjects in ((_OF_MEMORY, of_memory), (_OF_RANKS, of_ranks)):
        yield from (one._replace(read=partial(_over, one)).of(RANK, subjects) for one in families)
    yield from (one.of(RANK, counted) for one in _COUNTED)
    yield _READY.of(RANK, ready)
    yield _CAPACITY.of(RANK, capacity)


# -- the store below the pools ----------------------------------------------------------------------------------------


def _known(read: str, choose: Callable[..., Any], tiers: Sequence[TierStatus]) -> Any:
    return choose((value for one in tiers if (value := getattr(one, read)) is not None), default=None)


def _sum(field: str, tiers: Sequence[TierStatus]) -> Any:
    return sum(getattr(one, field) for one in tiers)


def _moved_bytes(part: StorePart) -> dict[str, int]:
    return {"read": part.counters.read_bytes, "write": part.counters.written_bytes}


_OF_TIERS = (
    gauge(
        "tier_up",
        "1 while the store is used and works; 0 also while it is off",
        lambda tiers: float({"on"} <= {one.state for one in tiers} <= {"on", "off"}),
    ),
    gauge("tier_writing_blocks", "Blocks that are being written", partial(_sum, "writing_blocks")),
    gauge("tier_reading_blocks", "Blocks that are being read", partial(_sum, "reading_blocks")),
    gauge(
        "tier_stuck_slots",
        "Slots that the store keeps although they are overdue",
        lambda tiers: max(one.stuck_slots for one in tiers),
    ),
    gauge(
        "tier_prefill_tokens_per_second",
        "Measured speed of computing prompts; absent until it is measured",
        partial(_known, "prefill_tokens_per_second", min),
    ),
)
_TIER_TOTALS = (
    *_counters(TierCounters),
    counter(
        "tier_failed_blocks",
        "Blocks that could not be moved",
        lambda counted: {"write": counted.failed_write_blocks, "read": counted.failed_read_blocks},
        ("direction",),
    ),
)
"""These include the counts of namespaces that have ended, because an engine that resets its cache begins a new one."""
_OF_PARTS = (
    gauge("tier_part_up", "1 while the part works", lambda part: float(part.state == "on")),
    counter("tier_part_bytes", "Bytes moved, of all ranks", _moved_bytes, ("direction",)),
    counter("tier_part_corrupt_blocks", "Blocks read that were not what was written", "counters.corrupt_blocks"),
    counter("tier_part_failed_blocks", "Blocks that could not be moved", "counters.failed_blocks"),
    counter("tier_part_refused_blocks", "Writes that found no room, queue or budget", "counters.refused_blocks"),
    counter("tier_part_restarts", "How often its process was started again", "counters.restarts"),
    counter("tier_part_timeouts", "Operations that were given up", "counters.timeouts"),
    gauge(
        "tier_part_queued_bytes",
        "Bytes that wait to be moved",
        lambda part: {"read": part.queued_read_bytes, "write": part.queued_write_bytes},
        ("direction",),
    ),
    gauge(
        "tier_part_read_bytes_per_second",
        "Measured rate of reads; absent until it is measured",
        "read_bytes_per_second",
    ),
)


def tier_metrics(tier: HostTier | None) -> Iterator[Metric]:
    """Yield the metrics of each pool, for all its namespaces together, and of the parts of the store. There are none
    without a store."""
    if tier is None:
        return
    tiers: dict[TierLabels, list[TierStatus]] = {}
    for one in tier.tiers():
        tiers.setdefault(TierLabels(one.store, one.pool, one.model), []).append(one)
    if tiers:
        yield from (family.of(TIER, tiers.items()) for family in _OF_TIERS)
        totals = tier.totals()
        yield from (family.of(TIER, totals.items()) for family in _TIER_TOTALS)
    parts = [((tier.store, part.name), part) for part in tier.parts()]
    yield from (family.of(PART, parts) for family in _OF_PARTS)


# -- namespaces -------------------------------------------------------------------------------------------------------

NAMESPACE = (*POOL, "namespace")
_OF_NAMESPACES = (
    counter("namespace_looked_up_blocks", "Blocks that engines of this namespace have looked up", "looked_up_blocks"),
    counter("namespace_hit_blocks", "Blocks that engines of this namespace have looked up and found", "hit_blocks"),
)


def namespace_metrics(namespaces: Iterable[NamespaceStatus]) -> Iterator[Metric]:
    """Yield the metrics that show which namespaces profit from a pool. Only namespaces that engines use now have
    series, so their number is limited as that of the engines is. An engine that has reset its cache counts in the same
    series as before."""
    used: dict[tuple[str, str, str], NamespaceStatus] = {}
    for one in namespaces:
        if one.sessions:
            used[one.pool, one.model, one.name.partition("@")[0]] = one  # equal for both, as they share their counts
    yield from (family.of(NAMESPACE, used.items()) for family in _OF_NAMESPACES)


# -- the server -------------------------------------------------------------------------------------------------------

_STATES: tuple[EngineState, ...] = get_args(EngineState)


_OF_HOST_MEMORY = (
    gauge("node_target_bytes", "Memory to populate, of all ranks", "target_bytes"),
    gauge("node_populated_bytes", "Memory that is populated, of all ranks", "populated_bytes"),
    gauge("node_granted_bytes", "Memory that is in pools", "granted_bytes"),
    gauge("node_used_bytes", "Memory of slots that are not free", "used_bytes"),
    gauge("node_recalled_bytes", "Memory on its way from a pool to others", "recalled_bytes"),
    gauge(
        "node_keeper_up",
        "1 while the process is there that holds the memory without a service; absent where there is to be none",
        lambda memory: None if memory.keeper is None else float(memory.keeper == "connected"),
    ),
    counter(
        "node_keeper_restarts",
        "How often a keeper has taken the place of one that was gone, or has come back",
        lambda memory: None if memory.keeper is None else memory.keeper_restarts,
    ),
)
_OF_SERVER = (
    counter(
        "rejected_connections",
        "Connections of engines that were refused, or ended for what they sent, by reason",
        "directory.rejected",
        ("reason",),
    ),
    gauge(
        "node_orphaned_bytes",
        "Memory of earlier services that processes still hold, as far as this one sees them; measured once a minute",
        "watch.measured.orphaned_bytes",
    ),
    gauge(
        "operations_inflight",
        "Operations in progress",
        lambda app: {kind: app.operations.num_running(kind) for kind in KINDS},
        ("kind",),
    ),
    counter("operations", "Operations that ended", lambda app: app.operations.ended, ("kind", "result")),
    Family(
        "histogram",
        "operation_duration_seconds",
        "Duration of an operation",
        lambda app: app.operations.seconds,
        ("kind",),
    ),
    counter(
        "http_requests",
        "HTTP requests by response status",
        lambda app: app.http.requests.copy(),
        ("method", "route", "code"),
    ),
    Family(
        "histogram",
        "http_request_duration_seconds",
        "Duration of an HTTP request",
        lambda app: app.http.seconds.copy(),
        ("method", "route"),
    ),
    gauge("http_requests_inflight", "HTTP requests in progress", "http.inflight"),
    Family("histogram", "event_loop_lag_seconds", "Lag of the event loop", lambda app: app.loop.snapshot()),
    counter("events_dropped", "Events that slow readers missed", lambda app: {"sse": app.streams.lost}, ("sink",)),
    gauge(
        "tls_certificate_expiry_timestamp_seconds",
        "Expiry of the admin server's certificate, if it uses TLS",
        lambda app: app.host.certificate().ends if app.host.certificate else None,
    ),
)


_CONDITION = gauge(
    "condition",
    "Conditions that `kvstow doctor` shows, by name and severity; absent while there is none",
    Counter,
    ("condition", "severity", *POOL),
)
"""No label names a session or a rank, because they come and go."""
_STATE = gauge(
    "state",
    "1 for the present state of the engine, or of the node that engines attach to",
    lambda state: {one: float(one == state) for one in _STATES},
    ("state",),
)


def _state_metrics(app: AppState, host: Evidence, pools: Sequence[Evidence]) -> Iterator[Metric]:
    yield _STATE.of((), [((), host.readiness.state)])
    yield from (one.of((), [((), host.memory)]) for one in _OF_HOST_MEMORY)
    models = {pool.name: pool.model for pool in app.directory.pools()}
    found = find_conditions(host, pools).conditions
    names = [(one.name, one.severity, one.pool or "", models.get(one.pool or "", "")) for one in found]
    yield _CONDITION.of((), [((), names)])
    failures = failures_of(host, pools)
    verdicts = [probe.run(failures=failures) for probe in app.probes.values()]
    ready = next(verdict.ok for verdict in verdicts if verdict.probe == "readyz")
    yield gauge("ready", "1 while /readyz answers 200", float).of((), [((), ready)])
    checks = {(one.name, verdict.probe): float(one.failure is None) for verdict in verdicts for one in verdict.findings}
    yield gauge("health_check", "1 while the check passes", dict, ("check", "probe")).of((), [((), checks)])


class Collector(BaseCollector):
    """Reads snapshots when it is scraped. O(pools + sessions + ranks + routes), regardless of the size of the pools.

    All series of a pool exist from its first scrape on, except those that need a report of a rank. They end with the
    pool, and Prometheus marks them stale at the next scrape. If a pool of the same name is made later, it counts from
    zero, which is an ordinary reset of counters. No label names a session, because engines come and go, and each would
    leave its series behind.
    """

    def __init__(self, app: AppState) -> None:
        self._app = app

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector does not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        app, host = self._app, self._app.host
        whole, of_each = app.conditions.gather()
        pools = self._pools(of_each)
        of_pools = [(pool.labels, pool) for pool in pools]
        yield from (one.of(POOL, of_pools) for one in _OF_POOLS)
        yield from (one.of(POOL, [(pool.labels, pool.stats) for pool in pools]) for one in _ENGINE_COUNTERS)
        errors = [(pool.labels, pool.stats.faults.errors) for pool in pools]
        yield _ERRORS.of(POOL, [*errors, (("", ""), app.directory.errors)])
        yield from _rank_metrics(pools)
        yield from namespace_metrics(app.directory.namespaces())
        yield from tier_metrics(app.directory.tier)
        yield from (one.of((), [((), app)]) for one in _OF_SERVER)
        yield from _state_metrics(app, whole, of_each)
        build = {"version": host.version, "python": platform.python_version(), "mode": host.mode, **host.build}
        yield gauge("build_info", "Versions in the labels; always 1", float).of(build, [(tuple(build.values()), 1)])

    def _pools(self, evidence: Sequence[Evidence]) -> list[PoolSnapshot]:
        """Return snapshots of all pools that have evidence, from about the same time."""
        directory, sampler = self._app.directory, self._app.sampler
        hosted, sessions = directory.pools(), directory.sessions()
        named = {pool.name: pool for pool in hosted}
        sampler.rank_counters.note(hosted, sessions)
        ranks: dict[str, dict[int, list[RankStatus]]] = {}
        states = session_states(sessions)
        for session in sessions:
            if session.state != "lost":
                for rank in session.ranks:
                    ranks.setdefault(session.pool, {}).setdefault(rank.rank, []).append(rank)
        return [
            PoolSnapshot(
                hosted=pool,
                stats=pool.facade.stats(),
                readiness=found.readiness,
                ranks=ranks.get(pool.name, {}),
                counted=sampler.rank_counters.of_pool(pool),
                session_states=states[pool.name],
                curve=found.curve,
            )
            for found in evidence
            if (pool := named.get(found.pool)) is not None and found.curve is not None
        ]
