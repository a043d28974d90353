"""The answers of the API that are not snapshots of the engine (`kvstow.stats`, `kvstow.status`): frozen dataclasses
that the server fills and the client reads back.

Standard library only, so that a client starts without pydantic. `examples.json` has an example of each.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal, get_args

from kvstow.messages import Direction
from kvstow.stats import EngineState, FaultStats, LookupStats, PendingTransfers, PoolStats, SlotCounts, TransferStats
from kvstow.status import (
    HOST_NAME,
    BlockStatus,
    DrainMode,
    HostedNamespace,
    HostedSession,
    MemoryStatus,
    RankStatus,
    Readiness,
    SessionState,
    TransferStatus,
)
from kvstow.tier.breaker import BreakerState
from kvstow.tier.tierstatus import TierCounters, TierState
from kvstow.tier.writepolicy import WriteMode
from kvstow_api.history import NowView, SessionNowView
from kvstow_api.tiercontrol import HostedTier

POOL_NAME = HOST_NAME

BlockState = Literal["cached", "leased", "protected"]
"""States of slots whose blocks can be loaded."""
Section = Literal["pool", "transfers", "lookups", "stores", "evictions", "faults"]
SECTIONS: tuple[Section, ...] = get_args(Section)
OperationKind = Literal["evict", "purge", "resize", "tier-purge"]
OperationState = Literal["running", "succeeded", "failed", "cancelled"]
EventType = Literal["state", "session", "rank", "operation", "change", "stored", "removed", "lost"]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)
BLOCK_EVENTS: tuple[EventType, ...] = ("stored", "removed")
"""One for each batch of blocks: sent only to clients that ask for them."""
Severity = Literal["info", "warning", "error"]


# -- the server ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoView:
    """`addresses`: where the server listens. `node`: engines attach to this server and leave it; otherwise it is
    embedded in the only one. `engine_id` is new in each life of the engine or the node. `token_required`: whether
    changes need a bearer token, or a client certificate."""

    name: str = "kvstow"
    version: str
    mode: str
    node: bool
    addresses: list[str]
    engine_id: str
    started: datetime
    uptime_seconds: float
    token_required: bool
    num_ranks: int
    pools: list[str]
    build: dict[str, str]
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RankView(RankStatus):
    """A rank as it last reported, of the engine `session`, which uses `pool`. `boot_id` and `last_report_age_seconds`
    are null before it has reported."""

    pool: str
    session: str

    @classmethod
    def of(cls, rank: RankStatus, session: HostedSession) -> RankView:
        figures = {field.name: getattr(rank, field.name) for field in fields(rank)}
        return cls(**figures, pool=session.pool, session=session.session_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReadinessView:
    """Whether a pool serves, and the reason."""

    pool: str
    model: str
    state: EngineState
    reason: str
    usable_slots: int
    capacity_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessView(Readiness):
    """The state of the host, of each pool, and of the ranks of all sessions. Slots are those of all pools. `memory` is
    that of all pools and ranks."""

    ranks: tuple[RankView, ...]
    pools: list[PoolReadinessView]
    memory: MemoryStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsView:
    """Counters of the pool `pool_name` since it was made. Sections that were not requested are null. `stores` counts
    blocks by outcome, `evictions` by reason."""

    pool_name: str
    model: str
    state: EngineState
    pool: PoolStats | None = None
    transfers: TransferStats | None = None
    lookups: LookupStats | None = None
    stores: dict[str, int] | None = None
    evictions: dict[str, int] | None = None
    faults: FaultStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Slots are of one rank; every rank has the same."""

    capacity_slots: int
    policy: Literal["lru", "arc"]
    pinning_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigView:
    """`runtime`: settings that a PATCH of `pool` changes while the engine runs; `etag` names them. All three are null
    while there is no pool. `startup`: settings that need a restart."""

    pool: str | None
    etag: str | None
    runtime: RuntimeConfig | None
    startup: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLevelView:
    """Level of one logger of KVStow; `ttl_seconds_left` until the former level returns, null if it stays."""

    logger: str
    level: str
    ttl_seconds_left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLevelsView:
    items: list[LogLevelView]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView:
    """`id` resumes the stream after this event (Last-Event-ID). `data` by type:

    `state`: pool (null for a node), state, reason. `session`: pool, session, engine, model, state, reason; the state is
    `over` when none of its processes can reach the memory any more. `rank`: pool, session, rank, state, error, boot_id.
    `operation`: id, pool, kind, dry_run, state, error. `change`: actor, method, path, status, request_id. `stored`:
    pool, keys. `removed`: pool, keys, reason. `lost`: the number of events that a slow reader has missed, or null if
    the id is of an earlier life of the server. All but `lost`, `stored` and `removed` also have `time`.
    """

    id: str
    type: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView:
    """What the check `check` found, why it matters, how to fix it, and the measured numbers behind it. `pool` and
    `session`: what it is about; null for the host."""

    check: str
    severity: Severity
    pool: str | None = None
    session: str | None = None
    what: str
    why: str
    fix: str
    evidence: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorView:
    """`findings`, the worst first; `healthy` if none is worse than `info`. `skipped`: checks that had nothing to
    measure, and why."""

    checked: datetime
    healthy: bool
    findings: list[FindingView]
    checks: list[str]
    skipped: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemErrorView:
    """One error: the field, its value, and what is allowed instead."""

    field: str
    message: str
    value: Any
    allowed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemView:
    """RFC 9457 problem details. `instance` is the request id, which is also in the log."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    errors: list[ProblemErrorView]
    retry_after: int | None


# -- pools and blocks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """A pool. Slots and bytes are of one rank; every rank has the same. `etag` names its settings; `block_tokens` is
    null while the number of tokens in a block is unknown. `model` is that of the engine that made the pool, empty if
    unknown; `sessions` counts lost ones, too, and `session_states` has them by state. `resizable`: whether a PATCH can
    change the capacity.

    `granted_bytes`: what the pool has of the host's memory, on all ranks together. `due_bytes`: what it should have: as
    much as it has use for, up to its fair share. `drain_mode` and `bypassed`: what an operator has switched off, here
    or on the whole host. `pending`: transfers in flight. `now`: figures of the last seconds.
    """

    name: str
    model: str
    state: EngineState
    reason: str
    sessions: int
    session_states: dict[SessionState, int]
    resizable: bool
    etag: str
    slot_bytes: int
    block_tokens: int | None
    capacity_slots: int
    capacity_bytes: int
    max_capacity_slots: int
    max_capacity_bytes: int
    usable_slots: int
    usable_bytes: int
    granted_bytes: int
    slots: SlotCounts
    policy: str
    pinning_paused: bool
    leases: int
    num_ranks: int
    due_bytes: int
    drain_mode: DrainMode | None
    bypassed: list[Direction]
    pending: PendingTransfers
    now: NowView


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsView:
    items: list[PoolView]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """What a change of settings would do."""

    dry_run: Literal[True] = True
    capacity_slots: int
    policy: str
    pinning_paused: bool
    evicted_slots: int
    evicted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedView:
    """What was removed, or in a dry run would be. Bytes are of one rank."""

    evicted_slots: int
    evicted_bytes: int
    dry_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PinningView:
    """What the ranks are told about pinning in the answer to their next report. `pin_attempt` grows with each retry."""

    paused: bool
    pin_attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksView:
    """One page, in order of slots; `next_page_token` is null on the last one."""

    items: list[BlockStatus]
    next_page_token: str | None


# -- sessions and namespaces ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRankView:
    """A rank of an engine. `registered_slots`: the slots that it can copy to and from, counted from slot 0."""

    rank: int
    pid: int | None
    device: str | None
    registered_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """An engine that uses a pool. `pid`: its scheduler's process on `host`, null if unknown. `state`: `attaching` (not
    all ranks have reported and registered slots), `attached`, `stuck` (a transfer is too old), or `lost` (its
    connection has ended, and `processes` of it may still reach the memory).

    `in_flight`: transfers, the oldest for `oldest_seconds`. `leases`: those that no load has used. `quarantined_slots`
    are kept from others because processes of a lost session may still write them. `now`: figures of the last seconds.
    """

    id: str
    engine: str
    model: str
    pool: str
    namespace: str
    host: str
    pid: int | None
    state: SessionState
    age_seconds: float
    in_flight: int
    oldest_seconds: float
    leases: int
    leased_slots: int
    registered_slots: int
    quarantined_slots: int
    processes: int
    ranks: list[SessionRankView]
    now: SessionNowView

    @classmethod
    def of(cls, session: HostedSession, now: SessionNowView) -> SessionView:
        status = session.status
        return cls(
            id=session.session_id,
            engine=session.engine,
            model=session.model,
            pool=session.pool,
            namespace=session.namespace,
            host=session.host,
            pid=session.pid,
            state=status.state,
            age_seconds=session.age_seconds,
            in_flight=status.in_flight,
            oldest_seconds=status.oldest_seconds,
            leases=status.leases,
            leased_slots=status.leased_slots,
            registered_slots=status.registered_slots,
            quarantined_slots=status.quarantined_slots,
            processes=status.processes,
            ranks=[
                SessionRankView(rank=rank.rank, pid=rank.pid, device=rank.device, registered_slots=rank.pinned_slots)
                for rank in status.ranks
            ],
            now=now,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsView:
    """The oldest first. `rejected` counts, by reason, connections of engines that were refused, or ended for what they
    sent, since the host started."""

    items: list[SessionView]
    rejected: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachView:
    """What was begun: the session's connections end, and its processes are killed if `killed`. What it holds is freed
    when its processes have ended, which `GET /v1/sessions` shows: then the session is gone from it."""

    id: str
    killed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacesView:
    items: list[HostedNamespace]


# -- ranks, transfers and operations -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksView:
    """In the order of the sessions, the oldest first."""

    items: list[RankView]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferView(TransferStatus):
    """A transfer of the engine `session`, which uses `pool`. `queued` (no rank has reported on it), `running` (some
    have), `stuck` (too old), or `quarantined` (an abandoned store whose slots wait for the last ranks). `idle_ranks`:
    those of `pending_ranks` that have nothing under way, by their last report: the host has not submitted the transfer,
    or has not collected or passed on its completion."""

    pool: str

    @classmethod
    def of(cls, transfer: TransferStatus, pool: str) -> TransferView:
        figures = {field.name: getattr(transfer, field.name) for field in fields(transfer)}
        return cls(**figures, pool=pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransfersView:
    """`pending` counts all of these pools; `items` are the oldest."""

    pending: PendingTransfers
    items: list[TransferView]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """How many slots were visited, and of how many; of a purge of the tier, how many objects were removed."""

    done: int
    total: int
    unit: Literal["slots", "objects"] = "slots"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationView:
    """One operation at one moment. `waiting`: it cannot continue until transfers or leases end.

    `result` is null while the operation runs and when it has failed; of a cancelled one, it says what was done. A purge
    of the tier is of no pool, so `pool` is empty; it counts objects of the store, and its `result` stays null.
    """

    id: str
    pool: str
    kind: OperationKind
    dry_run: bool = False
    state: OperationState
    waiting: bool
    progress: ProgressView
    created: datetime
    started: datetime | None
    ended: datetime | None
    error: str | None
    result: RemovedView | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationsView:
    """Newest first; `next_page_token` is null on the last page."""

    items: list[OperationView]
    next_page_token: str | None


# -- the fleet tier ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBypassView:
    """Whether the store is left alone; `ttl_seconds_left` is null if that has no end."""

    bypassed: bool
    ttl_seconds_left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierClientView:
    """A client of the store: a connection, or a process. `state`: `connected`, `connecting` (not yet, or again),
    `failed` (until someone acts) or `closed`; `reason` is empty while connected. `restarts`: how often what connects to
    the store was ended and started again. `corrupt_objects`: those that were fetched and were not what was put."""

    purpose: str
    state: Literal["connected", "connecting", "failed", "closed"]
    reason: str
    restarts: int
    timeouts: int
    corrupt_objects: int
    put_bytes: int
    get_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPoolView:
    """The tier of a namespace of a pool. `state`: `on`, `off` (with the reason), `bypassed` by an operator, or `down`:
    the breaker is not closed. `fingerprint`: what its objects are known by, null while it is off.

    `write`: the mode that was set; `write_decision`: which blocks are put, and why. `decision`: the last one about a
    fetch, in words, from the three figures above it, which are null until they are measured. Of the blocks,
    `waiting_blocks` are to be put, `putting_blocks` and `fetching_blocks` are under way. `dropped_blocks` were to be
    put, and too many waited or the store was full; `breaker_opened` counts how often it has opened. `counters` are
    since the store was attached.
    """

    pool: str
    namespace: str
    model: str
    fingerprint: str | None
    state: TierState
    reason: str
    breaker: BreakerState
    bypass: TierBypassView
    write: WriteMode
    write_decision: str
    fetch_bytes_per_second: float | None
    lookup_seconds: float | None
    prefill_tokens_per_second: float | None
    decision: str
    waiting_blocks: int
    putting_blocks: int
    fetching_blocks: int
    dropped_blocks: int
    breaker_opened: int
    counters: TierCounters
    clients: list[TierClientView]

    @classmethod
    def of(cls, tier: HostedTier) -> TierPoolView:
        status = tier.status
        return cls(
            pool=tier.pool,
            namespace=tier.namespace,
            model=tier.model,
            fingerprint=tier.fingerprint,
            state=status.state,
            reason=status.reason,
            breaker=status.breaker,
            bypass=TierBypassView(bypassed=status.state == "bypassed", ttl_seconds_left=tier.bypass_seconds_left),
            write=status.write,
            write_decision=status.write_decision,
            fetch_bytes_per_second=status.fetch_bytes_per_second,
            lookup_seconds=status.lookup_seconds,
            prefill_tokens_per_second=status.prefill_tokens_per_second,
            decision=status.decision,
            waiting_blocks=status.waiting_blocks,
            putting_blocks=status.putting_blocks,
            fetching_blocks=status.fetching_blocks,
            dropped_blocks=status.dropped_blocks,
            breaker_opened=status.opened,
            counters=status.counters,
            clients=[
                TierClientView(
                    purpose=one.purpose,
                    state=one.health.state,
                    reason=one.health.reason,
                    restarts=one.stats.restarts,
                    timeouts=one.stats.timeouts,
                    corrupt_objects=one.stats.corrupt_objects,
                    put_bytes=one.stats.put_bytes,
                    get_bytes=one.stats.get_bytes,
                )
                for one in tier.clients
            ],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """The fleet tier of the host. `store`, `url` (without secrets) and `write` are null while no store is attached.
    `attachable`: whether one can be attached and detached while the host runs. `bypass`: of all pools; `items` has that
    of each."""

    attachable: bool
    store: str | None
    url: str | None
    write: WriteMode | None
    bypass: TierBypassView
    items: list[TierPoolView]


NO_TIER = TierView(
    attachable=False,
    store=None,
    url=None,
    write=None,
    bypass=TierBypassView(bypassed=False, ttl_seconds_left=None),
    items=[],
)
"""Of a host that cannot have a tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPurgedView:
    """How many objects of the fingerprint were removed from the store."""

    fingerprint: str
    objects: int
