"""The memory of a pool, as the store below it gets it."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from kvstow.attach.calls import ExtentBytes, ExtentGrant, ExtentSlots, GrantedExtents, PopulatedExtents
from kvstow.attach.calls import RevokedExtents as Revoked
from kvstow.attach.channel import close_fds, duplicates_of
from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.attach.wire import Message
from kvstow.control.pooltier import PoolTier
from kvstow.tier.blockstore import StoredExtent
from kvstow_service.node.pools.memoryholder import MemoryHolder
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool

logger = logging.getLogger("kvstow.tier")

ENGINE = "tier"
"""The name in records that stands for the store in place of an engine."""


class _WaitingExtent(NamedTuple):
    """An extent that is not populated yet. The holder of this object owns `fd`. `stride` is the distance between slots,
    in bytes."""

    grant: ExtentGrant
    fd: int
    stride: int


class TierMemory(MemoryHolder):
    """The processes of the store as a client of a pool's memory. Like the workers of an engine, they get the pool's
    extents, release them when they are recalled, and are recorded for the next service. But the host does not list them
    as a session, and they ask for one slot only, which is the least.

    The memory thread grants and revokes extents by `push`. The store gets an extent once all of it is populated. An
    extent is reported as released once no process of the store maps it. Only then can another pool get it.
    """

    def __init__(
        self,
        pool: NodePool,
        namespace: KnownNamespace,
        tier: PoolTier,
        memory: MemoryThread,
        post: Callable[[Callable[[], object]], object],
    ) -> None:
        """`post` makes the attach server's thread call something."""
        super().__init__(secrets.token_hex(8), pool, namespace, tier.session, 1)
        self.tier = tier
        self._memory, self._post = memory, post
        self.stored_ranks = list(pool.config.storing_ranks)
        """The ranks whose bytes are in the store, in the order of `StoredLayout.slot_bytes`."""
        self._waiting: dict[int, _WaitingExtent] = {}
        """Extents that were granted and are not populated yet, by id. Used only by the memory thread."""
        self._is_closed = False
        self.problem = ""
        """A sentence that says why the store does not use some of the pool's memory. Blocks in it are neither written
        nor read. Empty if there is no such memory."""
        self.has_ended = threading.Event()
        """Set when no process of the store has memory of the pool, and no transfer is under way."""

    def join(self, end: int) -> None:
        """Ask for the pool's extents. `end` is a descriptor that becomes readable, also for the next service, when no
        process of the store has memory any more."""
        host, token = socket.gethostname(), secrets.token_hex(16)
        for rank in self.stored_ranks:
            hello = Hello(role="worker", engine=ENGINE, host=host, pid=os.getpid(), rank=rank, token=token)
            self._memory.add_worker(self, hello, Peer(os.getpid(), os.geteuid(), os.getegid(), end))

    def _update_control(self, rank: int) -> None:
        memories = [self._memory_of(one) for one in self.stored_ranks]
        self.tier.session.set_registered(
            min(memory.registered_slots for memory in memories), min(memory.applied for memory in memories)
        )

    # -- the memory thread ------------------------------------------------------------------------------------

    def push(self, message: Message, *, rank: int | None = None, fds: Sequence[int] = ()) -> None:
        """Take a message of the memory thread: see `MemoryHolder.push`."""
        if rank is None:
            return
        match message:
            case GrantedExtents():
                if not self._is_closed:
                    self.tier.session.map_memory(self.client(rank))
                    for grant, fd in zip(message.extents, duplicates_of(fds), strict=True):
                        self._waiting[grant.extent_id] = _WaitingExtent(grant, fd, message.slot_stride)
                    populated = [ExtentBytes(one.extent_id, one.populated_bytes) for one in message.extents]
                    self._note_populated(rank, populated)
            case PopulatedExtents():
                self._note_populated(rank, message.extents)
            case Revoked():
                self._release(rank, message.extent_ids)

    def _note_populated(self, rank: int, extents: Iterable[ExtentBytes]) -> None:
        for extent_id, num_bytes in extents:
            if extent_id not in self._waiting or num_bytes < self._waiting[extent_id].grant.num_bytes:
                continue
            grant, fd, stride = self._waiting.pop(extent_id)
            extent = StoredExtent(extent_id, grant.first_slot, grant.num_slots, stride, grant.num_bytes)
            then = partial(self._note_added, rank, extent)
            try:
                self.tier.stored_pool.add_extent(self.stored_ranks.index(rank), extent, fd, then)
            finally:
                os.close(fd)

    def _note_added(self, rank: int, extent: StoredExtent, problem: str) -> None:
        if problem:
            self.problem = problem
            logger.error("the store below pool %s: %s", self.pool.name, problem)
            self.pool.facade.count_error("host")
        else:
            self._post(partial(self.registered, rank, [ExtentSlots(extent.extent_id, extent.num_slots)]))

    def _release(self, rank: int, extent_ids: Sequence[int]) -> None:
        for extent_id in extent_ids:
            if extent_id in self._waiting:
                os.close(self._waiting.pop(extent_id).fd)
            then = partial(self._post, partial(self._note_released, rank, extent_id))
            self.tier.stored_pool.remove_extent(self.stored_ranks.index(rank), extent_id, then)

    def _note_released(self, rank: int, extent_id: int) -> None:
        """Record a released extent. Called by the attach server's thread."""
        self.released(rank, (extent_id,))
        self._memory.do(self._memory.release, self.client(rank), (extent_id,))

    def _close_fds(self) -> None:
        self._is_closed = True
        waiting, self._waiting = self._waiting, {}  # later messages about these extents find no entry
        close_fds([fd for _, fd, _ in waiting.values()])

    # -- the end ----------------------------------------------------------------------------------------------

    def begin_end(self, then: Callable[[], object] = lambda: None) -> None:
        """Begin no more transfers, release all memory, and then call `then`, on any thread."""
        self._memory.do(self._memory.lose_session, self)
        self._memory.do(self._close_fds)
        self.tier.close(partial(self._end, then))

    def _end(self, then: Callable[[], object]) -> None:
        try:
            with ExitStack() as stack:  # calls `then` and sets the event even if something below fails
                stack.callback(self.has_ended.set)
                stack.callback(then)
                self.tier.session.lose("the node service has closed the store")
                for rank in self.stored_ranks:
                    self.pool.process_died(self.client(rank))
                    self._memory.do(self._memory.end_client, self.client(rank))
        except Exception:
            logger.exception("the end of the store below pool %s has failed", self.pool.name)
            self.pool.facade.count_error("host")
