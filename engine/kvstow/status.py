"""The state of the engine and of its ranks, transfers and blocks, as frozen snapshots that the admin API serves.

Times are in seconds. Ages are relative to the moment of the snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, get_args

from kvstow.messages import Direction, RankFigures, TierDirection
from kvstow.stats import EngineState, SlotState

DrainMode = Literal["stop_stores", "all"]
Refusal = Literal["not_ready", "draining", "bypassed"]
LoadRefusal = Refusal | Literal["too_many_leases"]
SessionState = Literal["attaching", "attached", "stuck", "lost"]
ProcessState = Literal["running", "stopped", "unknown"]
TransferState = Literal["queued", "running", "stuck", "quarantined"]
MemoryFailure = Literal["refused", "engine", "defect"]
KeeperState = Literal["connected", "silent", "gone"]

SESSION_STATES: tuple[SessionState, ...] = get_args(SessionState)
HOST_NAME = "host"
"""The name of the pool of an embedded engine, and of its namespace."""


@dataclass(frozen=True, kw_only=True)
class RankStatus(RankFigures):
    """A rank as it last reported. It belongs to the engine `session`, which uses `pool`. `boot_id` and
    `last_report_age_seconds` are null before its first report."""

    last_report_age_seconds: float | None = None
    pool: str = HOST_NAME
    session: str = ""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether traffic can flow, and how far each rank is."""

    state: EngineState
    reason: str
    usable_slots: int
    capacity_slots: int
    ranks: tuple[RankStatus, ...]


class CurveEvidence(NamedTuple):
    """What there is of each thing that a curve needs, and how much it needs: distinct blocks, as many as the pool has
    slots; and since then requests, and blocks that they have looked up. `seconds_left`: at the pace so far; None if
    that is unknown."""

    seen: int
    needed_seen: int
    requests: int
    needed_requests: int
    blocks: int
    needed_blocks: int
    seconds_left: float | None

    @property
    def progress(self) -> float:
        """From 0.0 to 1.0."""
        pairs = (self.seen, self.needed_seen), (self.requests, self.needed_requests), (self.blocks, self.needed_blocks)
        return sum(min(1.0, have / max(1, need)) for have, need in pairs) / len(pairs)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A size, and the share of blocks that a pool of it would hit, which may differ from the truth by `error`.
    `at_least`: such a pool was not full for all of the time that the curve goes back, so it may hit more in the long
    run; `seen_blocks`: how many distinct blocks were seen, up to its size. `seconds_left`: until it is known, at the
    pace so far."""

    num_slots: int
    ratio: float
    error: float = 0.0
    at_least: bool = False
    seen_blocks: int = 0
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class SizeCurve:
    """What the last `requests` requests, which looked up `blocks` blocks, would have hit in pools of other sizes, the
    smallest first."""

    points: tuple[CurvePoint, ...]
    requests: int
    blocks: int


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """One op in flight, of the engine `session`, which uses `pool`. Its `state` is `queued` (no rank has reported on
    it), `running` (some ranks have), `stuck` (it is too old), or `quarantined` (an abandoned store, whose slots wait
    for the last ranks). `idle_ranks`: the ranks of `pending_ranks` that have nothing under way, by their last report.
    The host has not submitted the op to them, or has not collected or passed on its completion."""

    op_id: int
    pool: str
    session: str
    direction: Direction | TierDirection
    state: TransferState
    blocks: int
    bytes: int
    age_seconds: float
    pending_ranks: tuple[int, ...]
    idle_ranks: tuple[int, ...]
    failed: bool
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFigures:
    """One engine that uses a pool. `state`: `attaching` (not all ranks have reported and registered slots), `attached`,
    `stuck` (a transfer is too old), or `lost` (its connection has ended, and `processes` of its processes may still
    reach the memory). `in_flight`: ops that some rank has not finished; the oldest has been in flight for
    `oldest_seconds`. `leases`: leases that no load has used. `quarantined_slots`: slots that are kept from others only
    because those processes may still write them.

    The host adds what the pool does not know: `model`, `age_seconds`, and `pid`, the process of the engine's scheduler
    on `host`; they are null or empty if unknown. `process`: whether that process is stopped (SIGSTOP, a debugger);
    `unknown` if the host does not see the process. Bytes per second are those of the last 10 s and of one rank; null
    until they are measured.
    """

    id: str
    engine: str
    model: str = ""
    pool: str
    namespace: str
    host: str = ""
    pid: int | None = None
    process: ProcessState = "unknown"
    state: SessionState
    age_seconds: float = 0.0
    in_flight: int
    oldest_seconds: float
    leases: int
    leased_slots: int
    registered_slots: int
    quarantined_slots: int
    processes: int
    load_bytes_per_second: float | None = None
    store_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatus(SessionFigures):
    """One engine that uses a pool, and its ranks: see `SessionFigures`."""

    ranks: tuple[RankStatus, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def summary(self) -> SessionSummary:
        figures = {one.name: getattr(self, one.name) for one in fields(SessionFigures)}
        return SessionSummary(**figures, num_ranks=self.num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSummary(SessionFigures):
    """One engine that uses a pool, without its ranks: see `SessionFigures`."""

    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceStatus:
    """One meaning of keys in a pool: the number of `sessions` that use it, and of its visible `blocks`. A `dropped`
    namespace only waits for its blocks to be evicted.

    The host adds the model and its weights: `weights_id` names the weights, and `weights_source` says where that name
    came from; they are null if unknown. `sharing_off`: sentences that say why its sessions share no blocks with others;
    empty if they may. `looked_up_blocks` and `hit_blocks` count what its sessions have looked up and found; a reset of
    their cache does not set them back.
    """

    name: str
    pool: str
    model: str = ""
    weights_id: str | None = None
    weights_source: str | None = None
    sessions: int
    blocks: int
    looked_up_blocks: int
    hit_blocks: int
    dropped: bool
    sharing_off: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryWait:
    """A pool that waits for `num_bytes` of memory which the processes of a session can still reach. It has waited for
    `seconds`."""

    pool: str
    session: str
    num_bytes: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """Memory that engines gave back `seconds` ago, and that some process still has. `sessions`: the sessions that had
    it and of which a process lives, as far as that is known; they may have detached. There may be none."""

    sessions: tuple[str, ...]
    num_bytes: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class UserLimit:
    """A user (uid) who holds as much of a resource as one user may, and gets no more of it. `what`: the name of the
    resource, for sentences. `sessions`: the sessions that hold it, the largest first."""

    uid: int
    what: str
    held: int
    most: int
    sessions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """A host's memory, over all pools and ranks: how much it should have (`target_bytes`), and how much is populated.
    `failure`: why it cannot grow further, or null. `failure_kind`: whether the machine has refused memory (`refused`),
    an engine stands in the way (`engine`), or KVStow has a defect (`defect`).

    `populate_bytes_per_second`: how fast memory was populated within the last seconds; null if none was.

    `granted_bytes` are in pools, and `used_bytes` of them hold blocks. `recalled_bytes` are on their way from a pool
    to others. `waits` say which sessions hold them, and `notices` say, in sentences, what else stands in the way.
    `kept`: memory that engines have given back, but that processes still have; it still counts. `orphaned_bytes`:
    memory of processes that no service uses any more; null if it is not measured.

    `keeper`: the state of the process that holds the memory while no service runs; null if none is configured. A
    `silent` keeper lives, but does not answer. `keeper_pid`: its process, null if it is gone. `unsaved`: what would not
    survive the end of the service, and why, in sentences. `keeper_restarts`: how often a keeper has replaced one that
    was gone, or has come back.
    """

    target_bytes: int
    populated_bytes: int
    failure: str | None = None
    failure_kind: MemoryFailure | None = None
    populate_bytes_per_second: float | None = None
    granted_bytes: int = 0
    used_bytes: int = 0
    recalled_bytes: int = 0
    orphaned_bytes: int | None = None
    waits: tuple[MemoryWait, ...] = ()
    kept: tuple[KeptMemory, ...] = ()
    notices: tuple[str, ...] = ()
    keeper: KeeperState | None = None
    keeper_pid: int | None = None
    unsaved: tuple[str, ...] = ()
    keeper_restarts: int = 0


@dataclass(frozen=True, slots=True)
class BlockStatus:
    """One block that can be loaded. `key` is in hex, and has a meaning only within `namespace`."""

    key: str
    namespace: str
    slot: int
    state: SlotState
    age_seconds: float
    idle_seconds: float
    leases: int


class BlockPage(NamedTuple):
    """Some blocks in order of their slots. `next_slot` continues the listing; it is None at the end."""

    blocks: tuple[BlockStatus, ...]
    next_slot: int | None


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Which of the keys are in the pool. `leading` counts the keys from the first one on that are present without a
    gap. `refusal`: why loads miss nevertheless, or null."""

    leading: int
    present: list[bool]
    refusal: Refusal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextStatus:
    """What the pool knows of a context that clients have named in hints. `context`: its id in hex (see
    `kvstow.hints.context_id`), which has a meaning only within `namespace`. `name`: what clients call it. Readers who
    are not admins get null for both, because the id is a hash of the name and the cache salt, which could be guessed
    from it. `blocks`: the blocks of its last request, whether the pool has them or not. `tokens` is null if the host
    does not know how many tokens a block has.

    `requests`: how many requests have named it. `idle_seconds`: the time since the end of the last one.
    `resume_in_seconds`: in how many seconds the next request comes, as its client or an operator has said; negative if
    the request is overdue, null if neither has said it.
    """

    context: str | None
    name: str | None
    namespace: str
    blocks: int
    bytes: int
    tokens: int | None
    requests: int
    idle_seconds: float
    resume_in_seconds: float | None


class ContextPage(NamedTuple):
    """Some contexts, those with the most blocks first. `next_rank` continues the listing; it is None at the end.
    `total`: how many contexts are known."""

    contexts: tuple[ContextStatus, ...]
    next_rank: int | None
    total: int


@dataclass(frozen=True, slots=True)
class BypassStatus:
    """Which directions are switched off. `ttl_seconds_left` is null if that has no end."""

    load: bool
    store: bool
    ttl_seconds_left: float | None


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """The state of a drain. `drained`: a drain is on, and nothing is in flight or leased any more."""

    active: bool
    mode: DrainMode | None
    deadline_seconds_left: float | None
    drained: bool
    pending_transfers: int
    leases: int
