"""The interface between the admin API and its host: pools, sessions, namespaces, memory, and the store below the pools.
It also has the directory of an embedded engine, and the readiness of a host over all its pools."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstow.control.engine import OffloadEngine, PoolFacade
from kvstow.errors import ConflictError, NotFoundError
from kvstow.messages import DesiredState, RankReport
from kvstow.stats import EngineState
from kvstow.status import (
    BypassStatus,
    DrainMode,
    DrainStatus,
    MemoryStatus,
    NamespaceStatus,
    RankStatus,
    Readiness,
    SessionState,
    SessionStatus,
    UserLimit,
)
from kvstow.tier.blockstore import Purged, StorePart
from kvstow.tier.tierstatus import TierCounters, TierStatus
from kvstow_api.answers import POOL_NAME, ReadinessView
from kvstow_api.texts import counted, populate_words

NO_POOL = "no engine has attached yet, so there is no pool"

_ALONE = "the pool is the memory of the engine that it is embedded in, and no other engine can attach to it"


@dataclass(frozen=True, slots=True)
class HostedPool:
    """A pool under its name. `max_capacity_slots` is the largest size that it can have. With `is_resizable`, an
    operator sets its size. Otherwise the host does. `granted_bytes` is how much of the host's memory it has, on all
    ranks together. `due_bytes` is how much it should have: as much as it can use, up to its fair share."""

    name: str
    facade: PoolFacade
    max_capacity_slots: int
    granted_bytes: int
    due_bytes: int
    model: str = ""
    is_resizable: bool = True
    stored_slot_bytes: int | None = None
    """The size of a slot on all ranks together, if ranks share bytes."""

    @property
    def shares_memory(self) -> bool:
        return self.stored_slot_bytes is not None and self.stored_slot_bytes < self.facade.config.total_slot_bytes

    @property
    def used_bytes(self) -> int:
        return self.facade.used_slots * (self.stored_slot_bytes or self.facade.config.total_slot_bytes)


class HostMemory(NamedTuple):
    """Memory of the machine that serves the API. Sizes are in bytes. A figure that cannot be measured is None or empty.

    `headroom_bytes` can be used before `limit` is reached, which is a text that names the limit. `reserve_bytes` of
    them are kept for the rest of the process. `huge_pages` is the kernel's setting for transparent huge pages (always,
    madvise, never), or `reserved` if the pools use reserved huge pages. These figures then apply to those pages.
    """

    headroom_bytes: int | None
    limit: str
    reserve_bytes: int
    huge_pages: str


class OrphanedMemory(NamedTuple):
    """Memory of a node service that a process has, and that no running service has. `extents` is the number of pieces.
    `num_bytes` leaves out memory that was counted for another process, and memory whose size is unknown because it is
    only mapped."""

    pid: int
    command: str
    extents: int
    num_bytes: int


class TierMeasurements(NamedTuple):
    """Measurements of the store for the doctor. `public_addresses` are addresses of the store that anyone on the
    internet may reach, although the store does not authenticate anybody. With `pins_memory`, the clients lock the
    memory of the pools. `memlock_bytes` is how much they may lock, or None for any amount."""

    public_addresses: tuple[str, ...] = ()
    pins_memory: bool = False
    memlock_bytes: int | None = None


class TierLabels(NamedTuple):
    """The names of a store, a pool and a model."""

    store: str
    pool: str
    model: str


class Switches(Protocol):
    """The switches of operators: those of one pool (`Administrator`), or those of a host for all its pools."""

    @property
    def drain_status(self) -> DrainStatus: ...

    @property
    def bypass(self) -> BypassStatus: ...

    def drain(self, mode: DrainMode, deadline_seconds: float | None) -> DrainStatus: ...

    def undrain(self) -> DrainStatus: ...

    def set_bypass(self, *, load: bool, store: bool, ttl_seconds: float | None) -> BypassStatus: ...


class HostTier(Protocol):
    """The store below the pools of a host. Any thread may make these calls. None of them waits, except `measure`."""

    @property
    def store(self) -> str:
        """The kind of store, such as `mooncake`."""

    @property
    def url(self) -> str:
        """The URL of the store without secrets and paths of files, because every reader sees it."""

    def tiers(self) -> Sequence[TierStatus]:
        """Return one status for each namespace that could use the store, the oldest first."""

    def parts(self) -> Sequence[StorePart]:
        """Return the parts of the store that can fail alone, such as paths of disks, or client processes."""

    def totals(self) -> Mapping[TierLabels, TierCounters]:
        """Return the totals of all namespaces that have used the store, including those that have ended, so that no
        total ever falls. Only pools of `tiers` have totals."""

    def prefetch(self, pool: str, context: bytes) -> int:
        """Begin to bring the blocks that the store has of a context into the pool. Returns how many blocks the
        context's last request had used. Raises `NotFoundError` if no request of the context is known, and
        `ConflictError` if the store is not used."""

    def measure(self) -> TierMeasurements:
        """Measure the store. This waits for the resolution of names, so call it on a thread."""


class Directory(Protocol):
    """The pools of a host and their users. Any thread may make these calls, and the event loop makes most of them. They
    do not wait, except `delete_pool`, and each costs O(its result)."""

    @property
    def engine_id(self) -> str:
        """Identifies this life of the host."""

    @property
    def is_node(self) -> bool:
        """Whether engines attach to the host and detach from it, and pools come and go with them. Otherwise there is
        one pool, of the engine that embeds the host."""

    @property
    def switches(self) -> Switches:
        """The switches of all pools, including those that are made later."""

    @property
    def tier(self) -> HostTier | None:
        """The store below the pools. None if there is none."""

    @property
    def take_report(self) -> Callable[[RankReport], DesiredState] | None:
        """Takes a report that a rank has sent over HTTP. None if ranks report in another way."""

    @property
    def trust_eof(self) -> float | None:
        """After how many seconds processes whose end cannot be seen count as ended. None if time ends nothing."""

    @property
    def errors(self) -> Mapping[str, int]:
        """Errors of the host by code, apart from those that a pool counts."""

    @property
    def rejected(self) -> Mapping[str, int]:
        """Connections of engines that were refused, or ended for what they sent, by reason. The reasons are always the
        same."""

    def pools(self) -> Sequence[HostedPool]:
        """Return all pools, the oldest first."""

    def find_pool(self, name: str) -> HostedPool | None: ...

    def delete_pool(self, name: str) -> Purged:
        """Delete a pool and all its blocks. Other pools get its memory as soon as no process can reach it. This waits
        until the store below the pool has deleted its blocks for good, and returns how many there were. Raises
        `NotFoundError`, or `ConflictError` if the pool has sessions or cannot be deleted."""

    def sessions(self) -> Sequence[SessionStatus]:
        """Return all sessions, the oldest first, including lost ones."""

    def user_limits(self) -> Sequence[UserLimit]:
        """Return the users whose engines have reached a limit of one user."""

    def detach(self, session_id: str, *, kill: bool) -> bool:
        """Begin to end a session, and with `kill` also kill its processes. Returns False if there is no such session.
        What it holds is freed when its processes have ended, and not before. Raises `ConflictError` if this host cannot
        end its sessions."""

    def namespaces(self) -> Sequence[NamespaceStatus]: ...

    def memory(self) -> MemoryStatus: ...

    def count_error(self, code: str) -> None:
        """Count an error of the host. `code` is one of `kvstow.stats.ERRORS`."""


class EmbeddedDirectory:
    """The `Directory` of one engine. `max_capacity_slots` limits every resize. It is what the ranks' reserved address
    space can hold. `name` is that of the inference engine."""

    is_node = False
    trust_eof = None
    tier: HostTier | None = None
    """An embedded engine has no store below its pool."""

    def __init__(
        self,
        engine: OffloadEngine,
        max_capacity_slots: int,
        *,
        name: str = "",
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine_id = engine.engine_id
        self.switches = engine.admin
        self.errors: Mapping[str, int] = {}
        self.rejected: Mapping[str, int] = {}
        self._engine, self._name, self._model = engine, name, model
        self._max_capacity_slots = max_capacity_slots
        self._clock, self._started_at = clock, clock()

    def take_report(self, report: RankReport) -> DesiredState:
        return self._engine.report(report)

    def pools(self) -> Sequence[HostedPool]:
        return (self._pool(),)

    def find_pool(self, name: str) -> HostedPool | None:
        return self._pool() if name == POOL_NAME else None

    def _pool(self) -> HostedPool:
        """Return the engine's pool. It shares its memory with no other pool, so it always has what it should have."""
        num_bytes = self._engine.desired().capacity_slots * self._engine.config.total_slot_bytes
        return HostedPool(POOL_NAME, self._engine, self._max_capacity_slots, num_bytes, num_bytes, self._model)

    def delete_pool(self, name: str) -> Purged:
        if name != POOL_NAME:
            raise NotFoundError(f"there is no pool {name!r}; there is: {POOL_NAME}")
        raise ConflictError("the pool belongs to the engine that it is embedded in, and ends with its process")

    def sessions(self) -> Sequence[SessionStatus]:
        readiness, stats = self._engine.readiness(), self._engine.stats()
        pending = stats.transfers.pending
        state: SessionState = "attached" if readiness.usable_slots else "attaching"
        return (
            SessionStatus(
                id=self.engine_id,
                engine=self._name,
                model=self._model,
                pool=POOL_NAME,
                namespace=POOL_NAME,
                host=socket.gethostname(),
                pid=os.getpid(),
                process="running",
                state="stuck" if pending.stuck else state,
                age_seconds=self._clock() - self._started_at,
                in_flight=pending.loads + pending.stores,
                oldest_seconds=pending.oldest_seconds,
                leases=stats.pool.leases,
                leased_slots=stats.pool.slots.leased,
                registered_slots=readiness.usable_slots,
                quarantined_slots=stats.pool.slots.quarantined,
                processes=len({(rank.host, rank.pid) for rank in readiness.ranks if rank.pid is not None}),
                ranks=readiness.ranks,
            ),
        )

    def user_limits(self) -> Sequence[UserLimit]:
        return ()

    def detach(self, session_id: str, *, kill: bool) -> bool:
        if session_id != self.engine_id:
            return False
        raise ConflictError("the engine embeds this server: stop its process to end the session")

    def namespaces(self) -> Sequence[NamespaceStatus]:
        stats = self._engine.stats()
        slots = stats.pool.slots
        return (
            NamespaceStatus(
                name=POOL_NAME,
                pool=POOL_NAME,
                model=self._model,
                sessions=1,
                blocks=slots.cached + slots.leased,
                looked_up_blocks=stats.lookups.query_blocks,
                hit_blocks=stats.lookups.hit_blocks,
                dropped=False,
                sharing_off=(_ALONE,),
            ),
        )

    def memory(self) -> MemoryStatus:
        ranks = self._engine.readiness().ranks
        failures = [f"rank {rank.rank}: {rank.error or rank.error_reason}" for rank in ranks if rank.error_reason]
        pool = self._pool()
        return MemoryStatus(
            target_bytes=sum(rank.target_bytes for rank in ranks),
            populated_bytes=sum(rank.pinned_bytes for rank in ranks),
            failure="; ".join(failures) or None,
            granted_bytes=pool.granted_bytes,
            used_bytes=pool.used_bytes,
        )

    def count_error(self, code: str) -> None:
        self._engine.count_error(code)


def host_readiness(directory: Directory, pool: HostedPool | None = None) -> ReadinessView:
    """Return the readiness of one pool, or of the whole host. Sizes of memory are the host's in any case. O(pools +
    ranks)."""
    memory = directory.memory()
    pools = directory.pools() if pool is None else (pool,)
    found = [(one.name, one.facade.readiness()) for one in pools]
    state: EngineState
    if pool is not None or not directory.is_node:
        ((_, only),) = found
        state, reason = only.state, only.reason
    else:
        state, reason = _node_state(directory, found)
    return ReadinessView(
        state=state,
        reason=reason,
        usable_slots=sum(one.usable_slots for _, one in found),
        capacity_slots=sum(one.capacity_slots for _, one in found),
        ranks=live_ranks(directory, pool),
        memory=memory,
    )


def _node_state(directory: Directory, pools: Sequence[tuple[str, Readiness]]) -> tuple[EngineState, str]:
    """Return the state of a node, and its reason. A node serves other pools while one is starting or pinning, so only a
    degraded or stopped pool counts."""
    drain, memory = directory.switches.drain_status, directory.memory()
    if drain.active:
        return "draining", f"the node drains (mode {drain.mode})"
    troubles = [f"pool {name}: {it.reason}" for name, it in pools if it.state in ("degraded", "stopped")]
    if memory.failure:
        troubles.insert(0, f"memory: {memory.failure}")
    if troubles:
        return "degraded", "; ".join(troubles)
    if memory.populated_bytes < memory.target_bytes:
        return "pinning", populate_words(memory)
    sessions = len(directory.sessions())
    return "ready", f"{counted(len(pools), 'pool')}, {counted(sessions, 'session')}" if pools else NO_POOL


def live_ranks(
    directory: Directory, pool: HostedPool | None = None, session_id: str | None = None
) -> tuple[RankStatus, ...]:
    """Return the ranks of the sessions that are not lost: of all sessions, of those of one pool, or of one session."""
    return tuple(
        rank
        for session in directory.sessions()
        if session.state != "lost" and (pool is None or session.pool == pool.name) and session_id in (None, session.id)
        for rank in session.ranks
    )
