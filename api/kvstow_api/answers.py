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
    """The server. `host_name` is the machine or the pod on which it runs. `addresses` are those at which it listens.
    `attach` is the value of the engines' setting `attach` with which they use this server, and null if no engine can
    attach. With `node`, engines attach to this server and detach from it. Otherwise it is embedded in its only engine.
    `engine_id` is new in each life of the engine or the node. `token_required` says whether changes need a bearer token
    or a client certificate."""

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
    numbers behind it. `pool`, `session` and `rank` say what it concerns, and are null if it concerns the host. `name`
    is also used by the metric `kvstow_condition` and by the alerts."""

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
    """The diagnosis. `conditions` come with the worst first. `healthy` says that none is worse than `info`. `checked`
    names the conditions that were checked. `skipped` names those that could not be measured, with the reason."""

    time: datetime
    healthy: bool
    conditions: list[ConditionView]
    checked: list[str]
    skipped: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessView(Readiness):
    """The state of the host, or of one pool, and of the ranks of its sessions. Slots are those of all these pools.
    `memory` is that of all pools and ranks. `conditions` say what is wrong, the worst first."""

    memory: MemoryStatus
    conditions: list[ConditionView] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLevelView:
    """The level of one logger of KVStow."""

    logger: str
    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLevelsView:
    items: list[LogLevelView]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemErrorView:
    """One error: the field, its value, and which values are allowed."""

    field: str
    message: str
    value: Any
    allowed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemView:
    """Problem details of RFC 9457. `instance` is the request id, which is also in the log."""

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
"""Events of batches of blocks. They are sent only to clients that ask for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView:
    """An event. With `id` as Last-Event-ID, a client resumes the stream after this event. `data` depends on the type:

    `state`: pool (null for a node), state, reason. `session`: pool, session, engine, model, state, reason. The state is
    `over` when none of the session's processes can reach the memory any more. `rank`: pool, session, rank, state,
    error, boot_id. `tier`: pool, namespace, store, state, reason, about a namespace's use of the store below the pools.
    The state is `over` when the namespace has ended. `operation`: id, pool, kind, dry_run, state, error. `change`:
    actor, method, path, status, request_id. `stored`: pool, keys. `removed`: pool, keys, reason. `lost`: the number of
    events that a slow reader has missed, or null if the id is of an earlier life of the server.

    All types but `lost`, `stored` and `removed` also have `time`.
    """

    id: str
    type: str
    data: dict[str, Any]


# -- pools and what uses them --------------------------------------------------------------------------------------


POOL_NAME = HOST_NAME
BlockState = Literal["cached", "leased"]
"""The states of slots whose blocks can be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """A pool. Slots and bytes are of one rank, and every rank has the same. `etag` names its settings. `block_tokens`
    is null while the number of tokens in a block is unknown. `model` is that of the engine that made the pool, and
    empty if unknown. `sessions` counts lost ones, too, and `session_states` has the counts by state. `resizable` says
    whether a PATCH can change the capacity.

    `granted_bytes` is how much of the host's memory the pool has, on all ranks together. `due_bytes` is how much it
    should have: as much as it can use, up to its fair share. `drain_mode` and `bypassed` are what an operator has
    switched off, in this pool or on the whole host. `pending` are the transfers in flight. `now` are figures of the
    last seconds.
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
    """A size of a pool, `times` as large as it is now, and the share of blocks that it would have hit (`ratio`, which
    never falls from one size to the next), give or take `error`. If `at_least` is true, `ratio` is a lower bound:
    a pool of this size was not full yet when the first of these requests came. `seen_blocks` counts the distinct blocks
    that the pool has seen, up to this size. `seconds_left` is about how long it takes until `ratio` is no lower bound
    any more, and null if it is none, or if the pace is unknown. Bytes are of all ranks together."""

    num_slots: int
    num_bytes: int
    times: float
    ratio: float
    error: float
    at_least: bool
    seen_blocks: int
    seconds_left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCurveView:
    """What the last `requests` requests, which looked up `blocks` blocks, would have hit in pools of other sizes.
    `items` are the sizes, the smallest first. The share of the present size is the pool's own. While there is not
    enough evidence, or without a curve, `items` is empty, all figures below it are null, and `advice` says why. While
    the pool has not been full, only the figures that say what to do are null. All of this but `saved_seconds_per_hour`
    stays the same until one of its figures has changed by two points, and for ten minutes at most.

    `slot_bytes` are of one rank, all other bytes of all ranks together. `everything` is the share that the largest size
    would hit. `advice` says in a sentence what follows for the size. `disk_advice` says what disks below the memory
    would add, by the sizes that are at least eight times the pool. `next_useful` is the smallest larger size for which
    each doubling up to it adds two points on the average. `enough` is the smallest size that would lose no more than
    half a point. `end` is the smallest size, not smaller than the pool, above which larger ones add less than a point.
    Each of the three is null if there is no such size.

    `saved_seconds_per_hour` is how many seconds of prefill hits have saved per hour in the last five minutes. It is
    null if unknown.
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
    disk_advice: str | None = None
    saved_seconds_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """The effects that a change of settings would have."""

    dry_run: Literal[True] = True
    capacity_slots: int
    policy: str
    pinning_paused: bool
    evicted_slots: int
    evicted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedView:
    """The blocks that were removed or, in a dry run, would be. Bytes are of one rank. `stored_blocks` counts blocks
    removed from the store below the pool. `notice` is a sentence about blocks that may be left there, or empty."""

    evicted_slots: int
    evicted_bytes: int
    stored_blocks: int = 0
    notice: str = ""
    dry_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedPoolView:
    """A deleted pool. For `stored_blocks` and `notice`, see `RemovedView`."""

    stored_blocks: int
    notice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinningView:
    """The state of pinning that the ranks get with the answers to their next reports. `pin_attempt` grows with each
    retry."""

    paused: bool
    pin_attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextsView:
    """A page of the contexts of a pool, those with the most blocks first. `total` is the number of contexts that the
    pool knows."""

    items: list[ContextStatus]
    total: int
    next_page_token: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextView:
    """One context, with an item for each namespace that has it."""

    items: list[ContextStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextBlocksView:
    """How many blocks a context had claimed, or its last request had used."""

    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksView:
    """One page of blocks, in the order of their slots. `next_page_token` is null on the last page."""

    items: list[BlockStatus]
    next_page_token: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksView:
    """Ranks, in the order of their sessions, the oldest first."""

    items: list[RankStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsView:
    """Sessions, the oldest first. `rejected` counts, by reason, the connections of engines that were refused, or ended
    for what they sent, since the host started."""

    items: list[SessionStatus]
    rejected: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachView:
    """A detach that has begun: the session's connections end, and its processes are killed if `killed` is true. What
    the session holds is freed when its processes have ended. It then disappears from `GET /v1/sessions`."""

    id: str
    killed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacesView:
    items: list[NamespaceStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransfersView:
    """Transfers in flight. `pending` and `load_choices` count those of all pools of the request, and `items` are the
    oldest. `load_choices` counts loads since the start by the way that was chosen and the reason, such as
    `layer_alone`: within the step that computes with the blocks (`layer`), or before it (`async`)."""

    pending: PendingTransfers
    load_choices: dict[str, int]
    items: list[TransferStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """The store below the pools. `store` and `url`, which has no secrets, are null if there is none. `parts` are the
    parts of the store that can fail alone."""

    store: str | None
    url: str | None
    items: list[TierStatus]
    parts: list[StorePart] = field(default_factory=list)


NO_TIER = TierView(store=None, url=None, items=[])
"""The tier of a host without a store."""


# -- for viewers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLine:
    """One of the latest events, as a sentence."""

    time: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubledView:
    """The listed things that warnings and errors concern: names of pools, ids of sessions, ranks as SESSION/RANK, and
    namespaces whose use of the store is concerned."""

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
    """How many slots were visited, and how many there are to visit."""

    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationView:
    """The state of one operation. With `waiting`, it cannot continue until transfers or leases end.

    `result` is null while the operation runs and after it has failed. After a cancellation, it says what was done.
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
    """Operations, the newest first. `next_page_token` is null on the last page."""

    items: list[OperationView]
    next_page_token: str | None
