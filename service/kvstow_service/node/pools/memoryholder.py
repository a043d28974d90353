"""The memory that the workers of a session have, as the attach server's thread records it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvstow.attach.calls import ExtentGrant, ExtentSlots
from kvstow.attach.hello import Hello, digest_of
from kvstow.attach.peer import Peer
from kvstow.attach.wire import Message
from kvstow.control.attachedsession import AttachedSession
from kvstow.errors import InvalidRequestError
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool
from kvstow_service.node.survival.roster import WorkerRecord


@dataclass(slots=True)
class _GrantedExtent:
    grant: ExtentGrant
    registered: int = 0
    revoked: bool = False

    @property
    def end(self) -> int:
        return self.grant.first_slot + self.grant.num_slots


class RankMemory:
    """The extents that a worker was sent and has not released. Used only by the attach server's thread. Each method is
    O(extents given), except `released`, which is O(all extents of the worker)."""

    def __init__(self) -> None:
        self._by_id: dict[int, _GrantedExtent] = {}
        self._by_number: dict[int, _GrantedExtent] = {}
        self._num_full = 0
        """How many extents, counted from number 0 on, have all their slots registered."""
        self.top_slot = 0
        """All slots of the worker's extents have smaller numbers than this."""
        self.applied = 0
        """The number of the newest desired state whose capacity is known to hold for the worker: it has no memory above
        that capacity."""

    def granted(self, grants: Iterable[ExtentGrant]) -> None:
        for grant in grants:
            extent = self._by_id[grant.extent_id] = self._by_number[grant.number] = _GrantedExtent(grant)
            self.top_slot = max(self.top_slot, extent.end)

    def revoked(self, extent_ids: Iterable[int]) -> None:
        for extent_id in extent_ids:
            if extent_id in self._by_id:
                self._by_id[extent_id].revoked = True

    def registered(self, extents: Sequence[ExtentSlots]) -> None:
        """Record how many slots of each extent, counted from its first slot, the worker can copy to and from. Raises
        `InvalidRequestError`, and changes nothing, if it names an extent that it does not have, or more slots than the
        extent has."""
        for extent_id, num_slots in extents:
            if num_slots > self._find(extent_id).grant.num_slots:
                raise InvalidRequestError(
                    f"{num_slots} slots of extent {extent_id} are registered; "
                    f"allowed: its {self._find(extent_id).grant.num_slots} slots at most"
                )
        for extent_id, num_slots in extents:
            extent = self._find(extent_id)
            extent.registered = num_slots
            if num_slots < extent.grant.num_slots:
                self._num_full = min(self._num_full, extent.grant.number)
        while (following := self._by_number.get(self._num_full)) and following.registered == following.grant.num_slots:
            self._num_full += 1

    def released(self, extent_ids: Sequence[int]) -> None:
        """Record that the worker has released these extents. Raises `InvalidRequestError`, and changes nothing, if it
        was not asked to release one of them."""
        for extent_id in extent_ids:
            if not self._find(extent_id).revoked:
                raise InvalidRequestError(f"extent {extent_id} was not revoked, so the worker cannot release it")
        for extent_id in set(extent_ids):
            extent = self._by_id.pop(extent_id)
            number = extent.grant.number
            if self._by_number.get(number) is extent:
                del self._by_number[number]
                self._num_full = min(self._num_full, number)
        self.top_slot = max((extent.end for extent in self._by_id.values()), default=0)

    @property
    def registered_slots(self) -> int:
        """All slots below this number are registered. O(1)."""
        extent = self._by_number.get(self._num_full)
        if extent is not None:
            return extent.grant.first_slot + extent.registered
        return self._by_number[self._num_full - 1].end if self._num_full else 0

    def _find(self, extent_id: int) -> _GrantedExtent:
        extent = self._by_id.get(extent_id)
        if extent is None:
            raise InvalidRequestError(f"this worker was not sent extent {extent_id}")
        return extent


class MemoryHolder(ABC):
    """A client of a pool's memory, with a worker for each rank: an engine's session, or the transfers of the store
    below the pool.

    Workers say in messages about each extent what they have registered and released. Their reports do not count for
    that. Used only by the attach server's thread, except `push` and attributes that never change.
    """

    def __init__(
        self,
        session_id: str,
        pool: NodePool,
        namespace: KnownNamespace,
        control: AttachedSession,
        wanted_slots: int | None,
    ) -> None:
        """`wanted_slots` is how many slots it asks for, or None if it asks for all."""
        self.session_id = session_id
        self.pool, self.namespace, self.control = pool, namespace, control
        self.wanted_slots = wanted_slots
        self.ranks = [RankMemory() for _ in range(pool.config.num_ranks)]

    @abstractmethod
    def push(self, message: Message, *, rank: int | None = None, fds: Sequence[int] = ()) -> None:
        """Send a message to the worker of `rank`, or to the scheduler half if `rank` is None. From any thread. It never
        waits. A receiver gets messages in the order of the calls. If it is not connected, the message is dropped. The
        caller still owns the descriptors. A worker that was sent descriptors counts as having memory from then on: see
        `NodeSession.end_worker`. Raises `OSError`, and sends nothing, if this process can have no more descriptors."""

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def client(self, rank: int) -> str:
        """Return the name of a rank's worker, which is unique among all processes of the node."""
        return f"{self.session_id}/{rank}"

    def worker_record(self, hello: Hello, peer: Peer) -> WorkerRecord:
        return WorkerRecord(
            session_id=self.session_id,
            token_digest=digest_of(hello.token),
            number=self.control.session_id,
            pool=self.pool.name,
            namespace=self.namespace.name,
            wanted_slots=self.wanted_slots,
            hello=replace(hello.in_session(), token=""),
            uid=peer.uid,
            gid=peer.gid,
            has_pidfd=peer.pidfd is not None,
        )

    def registered(self, rank: int, extents: Sequence[ExtentSlots]) -> None:
        self.ranks[rank].registered(extents)
        self._update_control(rank)

    def released(self, rank: int, extent_ids: Sequence[int]) -> None:
        self.ranks[rank].released(extent_ids)
        self._update_control(rank)

    def follow_pool(self) -> None:
        for rank in range(len(self.ranks)):
            self._update_control(rank)

    def _update_control(self, rank: int) -> None:
        memory = self._memory_of(rank)
        self.control.set_memory(rank, memory.registered_slots, memory.applied)

    def _memory_of(self, rank: int) -> RankMemory:
        """Return the memory of a rank. If none of it lies above the newest desired state's capacity, the rank counts as
        having applied that state."""
        memory, desired = self.ranks[rank], self.pool.target.desired
        if memory.top_slot <= desired.capacity_slots:
            memory.applied = desired.number
        return memory
