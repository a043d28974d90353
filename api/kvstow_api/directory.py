"""What the admin API asks of its host: pools, sessions, namespaces, memory, and the fleet tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstow.control.engine import PoolFacade
from kvstow.messages import DesiredState, RankReport
from kvstow.status import BypassStatus, DrainMode, DrainStatus, MemoryStatus, NamespaceStatus, SessionStatus
from kvstow.tier.tierstatus import TierCounters, TierStatus

NO_POOL = "no engine has attached yet, so there is no pool"


@dataclass(frozen=True, slots=True)
class HostedPool:
    """A pool under its name. `max_capacity_slots`: what it can grow to. `is_resizable`: an operator sets its size;
    otherwise the host does. `granted_bytes`: what it has of the host's memory, on all ranks together; `due_bytes`: what
    it should have, which is as much as it has use for, up to its fair share."""

    name: str
    facade: PoolFacade
    max_capacity_slots: int
    granted_bytes: int
    due_bytes: int
    model: str = ""
    is_resizable: bool = True
    stored_slot_bytes: int | None = None
    """What a slot takes on all ranks together, if ranks share bytes."""

    @property
    def shares_memory(self) -> bool:
        """All ranks of an engine use the same memory."""
        return self.stored_slot_bytes is not None and self.stored_slot_bytes < self.facade.config.total_slot_bytes

    @property
    def used_bytes(self) -> int:
        """Of slots that are not free, on all ranks together."""
        return self.facade.used_slots * (self.stored_slot_bytes or self.facade.config.total_slot_bytes)


class HostMemory(NamedTuple):
    """Memory of the machine that serves the API. Sizes in bytes; None or empty if a figure cannot be measured.

    `headroom_bytes` can be used before `limit`, a text that names the limit, is reached. `reserve_bytes` of them are
    kept for the rest of the process. `huge_pages`: the kernel's setting for transparent huge pages (always, madvise,
    never), or `reserved` if the pools use reserved huge pages, to which these figures then apply.
    """

    headroom_bytes: int | None
    limit: str
    reserve_bytes: int
    huge_pages: str


class OrphanedMemory(NamedTuple):
    """Memory of a node service that is taken although no service uses it. `words` say who has it and what to do.
    `num_bytes`: without what was counted for another process."""

    words: str
    num_bytes: int


class TierMeasurements(NamedTuple):
    """What the doctor has to know. `public_addresses`: addresses of the store that anyone on the internet may reach.
    `has_access_control`: the store asks who its clients are. `pins_memory`: the clients lock the memory of the pools;
    `memlock_bytes`: how much they may lock, None for any amount."""

    public_addresses: tuple[str, ...] = ()
    has_access_control: bool = True
    pins_memory: bool = False
    memlock_bytes: int | None = None


TierLabels = tuple[str, str, str]
"""The names of the store, the pool and the model."""


class Switches(Protocol):
    """What operators switch off: in one pool (`Administrator`), or on a host in all its pools."""

    @property
    def drain_status(self) -> DrainStatus: ...

    @property
    def bypass(self) -> BypassStatus: ...

    def drain(self, mode: DrainMode, deadline_seconds: float | None) -> DrainStatus: ...

    def undrain(self) -> DrainStatus: ...

    def set_bypass(self, *, load: bool, store: bool, ttl_seconds: float | None) -> BypassStatus: ...


class HostTier(Protocol):
    """The fleet tier of a host. Calls are safe from any thread, and wait for nothing, except `measure`."""

    @property
    def store(self) -> str:
        """The kind of store, such as `redis`."""

    @property
    def url(self) -> str:
        """Has no secrets and no paths of files: every reader sees it."""

    def tiers(self) -> Sequence[TierStatus]:
        """One for each namespace that could use the store, the oldest first."""

    def totals(self) -> Mapping[TierLabels, TierCounters]:
        """Of all namespaces that have used the store, those that have ended included, so that no total ever falls. Only
        of pools that `tiers` has, too."""

    def prefetch(self, pool: str, context: bytes) -> int:
        """Begin to bring what the store has of a context into the pool; returns how many blocks the context's last
        request had used. Raises `NotFoundError` if no request of the context is known, and `ConflictError` if the store
        is not used."""

    def measure(self) -> TierMeasurements:
        """Waits for the resolution of names, so it is called on a thread of its own."""


class Directory(Protocol):
    """The pools of a host and their users. Every call is safe from any thread, waits for nothing, and costs O(what it
    returns): most are made on the event loop."""

    @property
    def engine_id(self) -> str:
        """Names this life of the host."""

    @property
    def is_node(self) -> bool:
        """Engines attach to the host and leave it, and pools come and go with them. Else there is one pool, of the
        engine that embeds the host."""

    @property
    def switches(self) -> Switches:
        """Of all pools, those to come included."""

    @property
    def tier(self) -> HostTier | None:
        """The fleet tier; None without one."""

    @property
    def take_report(self) -> Callable[[RankReport], DesiredState] | None:
        """Takes a report that a rank has sent over HTTP; None where ranks report on another way."""

    @property
    def trust_eof(self) -> float | None:
        """Seconds after which processes whose end cannot be seen count as ended; None if nothing ends by time."""

    @property
    def errors(self) -> Mapping[str, int]:
        """Errors of the host by code, other than those that a pool counts."""

    @property
    def rejected(self) -> Mapping[str, int]:
        """Connections of engines that were refused, or ended for what they sent, by reason. The reasons are always the
        same."""

    def pools(self) -> Sequence[HostedPool]:
        """All pools, the oldest first."""

    def find_pool(self, name: str) -> HostedPool | None: ...

    def delete_pool(self, name: str) -> None:
        """Forget a pool and all its blocks; its memory is for others as soon as no process can reach it. May wait for a
        lock. Raises `NotFoundError`, or `ConflictError` if the pool has sessions or cannot be deleted."""

    def sessions(self) -> Sequence[SessionStatus]:
        """All sessions, the oldest first, lost ones included."""

    def detach(self, session_id: str, *, kill: bool) -> bool:
        """Begin to end a session, and kill its processes if asked to; False if there is no such session. What it holds
        is freed when its processes have ended, and not before. Raises `ConflictError` if this host cannot end its
        sessions."""

    def namespaces(self) -> Sequence[NamespaceStatus]: ...

    def memory(self) -> MemoryStatus: ...

    def count_error(self, code: str) -> None:
        """Count an error of the host; `code` is one of `kvstow.stats.ERRORS`."""
