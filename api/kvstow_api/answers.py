"""The answers of the API that are not snapshots of the engine (`kvstow.stats`, `kvstow.status`): frozen dataclasses
that the server fills and the client reads back.

Standard library only, so that a client starts without pydantic. `examples.json` has an example of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, get_args

from kvstow.messages import Direction
from kvstow.stats import EngineState, EngineStats, PendingTransfers, SlotCounts
from kvstow.status import (
    HOST_NAME,
    BlockStatus,
    ContextStatus,
    DrainMode,
    MemoryStatus,
    NamespaceStatus,
    RankStatus,
    Readiness,
    SessionState,
    SessionStatus,
    SessionSummary,
    TransferStatus,
)
from kvstow.tier.blockstore import StorePart
from kvstow.tier.tierstatus import TierStatus
from kvstow_api.figures import CurvesView, HeadlineView, NowView

# -- the server ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoView:
    """`host_name`: the machine or the pod that it runs on. `addresses`: where the server listens. `attach`: what
    engines have as `attach` to use it, null where none can attach. `node`: engines attach to this server and leave it;
    otherwise it is embedded in the only one. `engine_id` is new in each life of the engine or the node.
    `token_required`: whether changes need a bearer token, or a client certificate."""

    name: str = "kvstow"
    version: str
    mode: str
    node: bool
    host_name: str
    attach: str | None
    addresses: list[str]
    engine_id: str
    started: datetime
    uptime_seconds: float
    token_required: bool
    num_ranks: int
    pools: list[str]
    build: dict[str, str]
    settings: dict[str, Any]


Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionView:
    """Something that an operator should know: its cause, why it matters, the command that mends it, and the measured
    numbers behind it. `pool`, `session` and `rank`: whom it concerns; null for the host. `name` is that of the metric
    `kvstow_condition` and of the alerts."""

    name: str
    severity: Severity
    pool: str | None = None
    session: str | None = None
    rank: int | None = None
    what: str
    why: str
    fix: str
    evidence: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorView:
    """`conditions`, the worst first; `healthy` if none is worse than `info`. `checked` names those that were looked
    for; `skipped`: those for which there was nothing to measure, and why."""

    time: datetime
    healthy: bool
    conditions: list[ConditionView]
    checked: list[str]
    skipped: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessView(Readiness):
    """The state of the host, or of one pool, and of the ranks of its sessions. Slots are those of all these pools.
    `memory` is that of all pools and ranks. `conditions`: what is wrong, the worst first."""

    memory: MemoryStatus
    conditions: list[ConditionView] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLevelView:
    """Level of one logger of KVStow."""

    logger: str
    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLevelsView:
    items: list[LogLevelView]


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


EventType = Literal["state", "session", "rank", "tier", "operation", "change", "stored", "removed", "lost"]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)
BLOCK_EVENTS: tuple[EventType, ...] = ("stored", "removed")
"""One for each batch of blocks: sent only to clients that ask for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView:
    """`id` resumes the stream after this event (Last-Event-ID). `data` by type:

    `state`: pool (null for a node), state, reason. `session`: pool, session, engine, model, state, reason; the state is
    `over` when none of its processes can reach the memory any more. `rank`: pool, session, rank, state, error, boot_id.
    `tier`: pool, namespace, store, state, reason, of the use that a namespace makes of the store below the pools; the
    state is `over` when the namespace is gone. `operation`: id, pool, kind, dry_run,
    state, error. `change`: actor, method, path, status, request_id. `stored`: pool, keys. `removed`: pool, keys,
    reason. `lost`: the number of events that a slow reader has missed, or null if the id is of an earlier life of the
    server.
    All but `lost`, `stored` and `removed` also have `time`.
    """

    id: str
    type: str
    data: dict[str, Any]


# -- pools and what uses them --------------------------------------------------------------------------------------


POOL_NAME = HOST_NAME
BlockState = Literal["cached", "leased"]
"""States of slots whose blocks can be loaded."""


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
class SizeView:
    """A size of a pool, `times` as large as it is now, and the shares of blocks that it would have hit: in the order of
    last use (`lru`), in the pool's own order (`own`), and as far as the pool's policy would reach it (`ratio`, which
    never falls from one size to the next). Bytes are of all ranks together."""

    num_slots: int
    num_bytes: int
    times: float
    lru: float
    own: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCurveView:
    """What the last `requests` requests, which looked up `blocks` blocks, would have hit in pools of other sizes.
    `items`: the sizes, the smallest first. While there is not enough evidence, or without a curve, `items` is empty,
    all figures below it are null, and `advice` says why.

    `slot_bytes` are of one rank, all other bytes of all ranks together. `everything`: the share that a pool would
    hit that never evicts. `advice`: what follows for the size, in a sentence. `next_useful`: the smallest larger
    size whose doublings each add two points on the average. `enough`: the smallest smaller size that would lose no
    more than half a point. `end`: the smallest size, not smaller than the pool, above which less than a point is
    left. Each is null if there is no such size.

    `saved_seconds_per_hour`: seconds of prefill that hits have saved, from the last five minutes; null if unknown.
    """

    pool: str
    policy: str
    num_slots: int
    num_bytes: int
    slot_bytes: int
    advice: str
    requests: int
    blocks: int
    items: list[SizeView]
    everything: float | None = None
    next_useful: SizeView | None = None
    enough: SizeView | None = None
    end: SizeView | None = None
    saved_seconds_per_hour: float | None = None


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
    """What was removed, or in a dry run would be. Bytes are of one rank. `stored_blocks`: from the store below the
    pool; `notice`: what may be left there, as a sentence, or empty."""

    evicted_slots: int
    evicted_bytes: int
    stored_blocks: int = 0
    notice: str = ""
    dry_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedPoolView:
    """`stored_blocks` and `notice`: as in `RemovedView`."""

    stored_blocks: int
    notice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinningView:
    """What the ranks are told about pinning in the answer to their next report. `pin_attempt` grows with each retry."""

    paused: bool
    pin_attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextsView:
    """A page of the contexts of a pool, those with the most blocks first; `total`: how many it knows."""

    items: list[ContextStatus]
    total: int
    next_page_token: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextView:
    """One context: an item for each namespace that has it."""

    items: list[ContextStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextBlocksView:
    """How many blocks a context had claimed, or its last request had used."""

    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksView:
    """One page, in order of slots; `next_page_token` is null on the last one."""

    items: list[BlockStatus]
    next_page_token: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksView:
    """In the order of the sessions, the oldest first."""

    items: list[RankStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsView:
    """The oldest first. `rejected` counts, by reason, connections of engines that were refused, or ended for what they
    sent, since the host started."""

    items: list[SessionStatus]
    rejected: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachView:
    """What was begun: the session's connections end, and its processes are killed if `killed`. What it holds is freed
    when its processes have ended, which `GET /v1/sessions` shows: then the session is gone from it."""

    id: str
    killed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacesView:
    items: list[NamespaceStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransfersView:
    """`pending` and `load_choices` count all of these pools; `items` are the oldest. `load_choices`: loads since the
    start by the way that they went and why, such as `layer_alone`: within the step that computes with it (`layer`) or
    before it (`async`)."""

    pending: PendingTransfers
    load_choices: dict[str, int]
    items: list[TransferStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """The store below the pools. `store` and `url` (without secrets) are null without one. `parts`: what of it fails
    alone."""

    store: str | None
    url: str | None
    items: list[TierStatus]
    parts: list[StorePart] = field(default_factory=list)


NO_TIER = TierView(store=None, url=None, items=[])
"""Of a host without a store."""


# -- for those who look --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLine:
    """One of the latest events in words; `kind` is its type."""

    time: str
    kind: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubledView:
    """What warnings and errors concern, of what the document lists: names of pools, ids of sessions, ranks as
    SESSION/RANK, and namespaces whose use of the store is concerned."""

    pools: list[str]
    sessions: list[str]
    ranks: list[str]
    tiers: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewView:
    """The state in one document, which the status page and `kvstow top` show. The server makes it at most once a
    second, and all viewers share it. Each list has a limit; items that are `troubled` take precedence, and `omitted`
    says how many items each list leaves out, by its name.

    `conditions` has the first condition of each name, the worst one first. `alike` says how many more conditions have
    the same name.

    `selected` is the pool that was asked for, or the only one. With a selected pool, `sessions`, `ranks`, `tier`,
    `transfers`, `curves`, `headline`, `events`, `stats` and `curve` describe that pool. Without one they describe the
    whole host, and `ranks` has only the ranks that a condition concerns. `is_missing` says that no pool has the name
    that was asked for. `pools` always has those of the whole host."""

    time: datetime
    info: InfoView
    state: EngineState
    reason: str
    conditions: list[ConditionView]
    alike: dict[str, int]
    troubled: TroubledView
    memory: MemoryStatus
    headline: HeadlineView
    selected: str | None
    is_missing: bool
    pools: list[PoolView]
    sessions: list[SessionSummary]
    ranks: list[RankStatus]
    tier: TierView
    transfers: TransfersView
    curves: list[CurvesView]
    stats: EngineStats | None
    curve: PoolCurveView | None
    events: list[EventLine]
    omitted: dict[str, int]


# -- operations ----------------------------------------------------------------------------------------------------


OperationKind = Literal["evict", "purge", "resize"]
OperationState = Literal["running", "succeeded", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """How many slots were visited, and of how many."""

    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationView:
    """One operation at one moment. `waiting`: it cannot continue until transfers or leases end.

    `result` is null while the operation runs and when it has failed; of a cancelled one, it says what was done.
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
