"""The fleet tier's view of one pool: its memory, and the transfers of its ranks."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from kvstow.attach.calls import ExtentBytes, ExtentGrant, ExtentSlots, GrantedExtents, PopulatedExtents
from kvstow.attach.calls import RevokedExtents as Revoked
from kvstow.attach.channel import close_fds, duplicates_of
from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.attach.wire import Message
from kvstow.control.attachedsession import TierSession
from kvstow.errors import CopyError
from kvstow.messages import TierCompletion, TierOp
from kvstow.tier.store import MemoryRange, TransferClient
from kvstow.tier.transfers import StoreTransfers
from kvstow_service.node.pools.memoryholder import MemoryHolder
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool

logger = logging.getLogger("kvstow.tier")


class _Mapped(NamedTuple):
    grant: ExtentGrant
    map: mmap.mmap
    memory: MemoryRange


class MappedRank:
    """The memory of one rank, made of extents that come and go. One thread changes it, and any may read.

    This process maps the extents too, because some clients of stores copy in it. It touches no byte of them itself, so
    they do not count in its resident size. An extent is removed only when no block of its slots is left in the pool and
    no op uses them, so `addresses` holds nothing.
    """

    def __init__(self, slot_bytes: int, client: TransferClient) -> None:
        """The caller keeps the client."""
        self.slot_bytes = slot_bytes
        self._client = client
        self._stride = slot_bytes
        self._extents: tuple[_Mapped, ...] = ()
        """Ordered by slot."""

    def add(self, grant: ExtentGrant, fd: int, slot_stride: int) -> None:
        """Map a populated extent. The caller keeps the descriptor. Raises `OSError` or `KvstowError`."""
        mapped = mmap.mmap(fd, grant.num_bytes)
        mapped.madvise(mmap.MADV_DONTFORK)
        memory = MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(mapped)), grant.num_bytes, fd)
        try:
            self._client.add_memory(memory)
        except BaseException:
            mapped.close()
            raise
        self._stride = slot_stride
        one = _Mapped(grant, mapped, memory)
        self._extents = tuple(sorted((*self._extents, one), key=lambda extent: extent.grant.first_slot))

    def remove(self, extent_id: int) -> None:
        """When this returns, no process maps the extent for the transfers. Ignores an extent that was not added."""
        gone = [one for one in self._extents if one.grant.extent_id == extent_id]
        self._extents = tuple(one for one in self._extents if one not in gone)
        for one in gone:
            self._client.remove_memory(one.memory)
            one.map.close()

    def clear(self) -> None:
        """Remove all extents. An error is raised after the others were removed."""
        with ExitStack() as stack:
            for one in self._extents:
                stack.callback(self.remove, one.grant.extent_id)

    def addresses(self, slots: Any) -> Any:
        """Raises `CopyError` for a slot that is not mapped."""
        extents = self._extents
        firsts = np.array([one.grant.first_slot for one in extents], np.int64)
        ends = np.array([one.grant.first_slot + one.grant.num_slots for one in extents], np.int64)
        bases = np.array([one.memory.address for one in extents], np.int64)
        index = np.searchsorted(firsts, slots, side="right") - 1
        if not len(extents) or (index < 0).any() or (slots >= ends[index]).any():
            raise CopyError("some of the slots are in memory that the node's transfers do not have")
        return bases[index] + (slots - firsts[index]) * self._stride


ENGINE = "fleet tier"


class PoolTier(MemoryHolder):
    """The node's own transfers as a client of a pool's memory, like the workers of an engine. They get the pool's
    extents, release them when they are recalled, and are recorded for the next service. They are no engine: the host
    does not list them, and they ask for one slot, the least that a session can ask for.

    It is its own `SessionLink`, through which the memory thread grants and revokes extents. An extent is mapped once
    all of it is populated, on a thread that may wait for the process that maps it. It is reported as released once no
    process of the transfers maps it. Until then no other session gets it.

    `control` has the processes. `add` registers a session for each namespace, with the same memory, before it gets any.
    `add` may be called from any thread. `submit`, `take_completions`, `retire`, `begin_end` and `end_sessions` are for
    the tier's thread.
    """

    def __init__(
        self,
        pool: NodePool,
        namespace: KnownNamespace,
        control: TierSession,
        transfers: StoreTransfers,
        memory: MemoryThread,
        do_later: Callable[[Callable[[], object]], object],
        post: Callable[[Callable[[], object]], object],
        on_news: Callable[[], None],
    ) -> None:
        """`do_later` has the thread that may wait call something, and `post` the attach server's thread."""
        super().__init__(secrets.token_hex(8), self, pool, namespace, control, 1)
        control.name, control.label = ENGINE, f"{ENGINE}: "
        self._memory, self._do_later, self._post, self._on_news = memory, do_later, post, on_news
        self._transfers = transfers
        self.mapped = {
            rank: MappedRank(pool.config.slot_bytes_of(rank), transfers.client) for rank in sorted(pool.storing_ranks)
        }
        """The memory of the ranks with objects of their own in the store."""
        self._lock = Lock()
        self._controls: list[TierSession] = [control]
        self._clients: set[str] = set()
        """The names of the workers that get memory."""
        self._registered = self._applied = 0
        self._unmapped: dict[int, tuple[ExtentGrant, int, int]] = {}
        """Extents that were granted and are not mapped yet, with their descriptors, which this object owns, and the
        stride of their slots."""
        self._ended = deque[tuple[TierSession, int, TierCompletion]]()
        """Ops whose ends are still to be reported, each with its rank."""
        self._is_closed = False
        self.problem: str | None = None
        """Why some of the pool's memory is not mapped for the transfers. Its blocks are neither put nor fetched."""
        self.has_ended = threading.Event()
        """Set when none of the pool's memory is mapped for the transfers, and none is under way."""

    def join(self, end: int | None) -> None:
        """Ask for the pool's extents. `end` becomes readable, also for the next service, when no process has them for
        the transfers any more."""
        host, token = socket.gethostname(), secrets.token_hex(16)
        for rank in self.mapped:
            hello = Hello(role="worker", engine=ENGINE, host=host, pid=os.getpid(), rank=rank, token=token)
            self._memory.add_worker(self, hello, Peer(os.getpid(), os.geteuid(), os.getegid(), end))

    # -- its sessions ---------------------------------------------------------------------------------------

    def add(self, control: TierSession) -> None:
        with self._lock:
            for client in self._clients:
                control.map_memory(client)
            self._controls.append(control)
            control.set_registered(self._registered, self._applied)

    def _note_client(self, client: str) -> None:
        with self._lock:
            self._clients.add(client)
            for control in self._controls:
                control.map_memory(client)

    def _update_control(self, rank: int) -> None:
        memories = [self._memory_of(one) for one in self.mapped]
        with self._lock:
            self._registered = min(memory.registered_slots for memory in memories)
            self._applied = min(memory.applied for memory in memories)
            for control in self._controls:
                control.set_registered(self._registered, self._applied)

    # -- memory ---------------------------------------------------------------------------------------------

    def push(self, message: Message, *, rank: int | None = None, fds: Sequence[int] = ()) -> None:
        """On the memory thread: see `SessionLink`."""
        if rank is None:
            return
        match message:
            case GrantedExtents():
                copies = duplicates_of(fds)
                self._note_client(self.client(rank))
                self._do_later(partial(self._take, rank, message.slot_stride, message.extents, copies))
            case PopulatedExtents():
                self._do_later(partial(self._note_populated, rank, message.extents))
            case Revoked():
                self._do_later(partial(self._release, rank, message.extent_ids))

    def _take(self, rank: int, stride: int, grants: Sequence[ExtentGrant], fds: Sequence[int]) -> None:
        if self._is_closed:
            close_fds(fds)
            return
        for grant, fd in zip(grants, fds, strict=True):
            self._unmapped[grant.extent_id] = grant, fd, stride
        self._note_populated(rank, [ExtentBytes(grant.extent_id, grant.populated_bytes) for grant in grants])

    def _note_populated(self, rank: int, extents: Iterable[ExtentBytes]) -> None:
        for extent_id, num_bytes in extents:
            if extent_id not in self._unmapped or num_bytes < self._unmapped[extent_id][0].num_bytes:
                continue
            grant, fd, stride = self._unmapped[extent_id]
            try:
                self.mapped[rank].add(grant, fd, stride)
            except Exception as error:  # noqa: BLE001 - the other extents are mapped
                self.problem = f"memory of rank {rank} could not be mapped: {error}"
                self.note_defect("the mapping of memory")
                continue
            del self._unmapped[extent_id]
            os.close(fd)
            self._post(partial(self.registered, rank, [ExtentSlots(extent_id, grant.num_slots)]))

    def _release(self, rank: int, extent_ids: Sequence[int]) -> None:
        self._unmap(rank, extent_ids)
        self._post(partial(self._report_released, rank, tuple(extent_ids)))

    def _unmap(self, rank: int, extent_ids: Sequence[int]) -> None:
        for extent_id in extent_ids:
            if extent_id in self._unmapped:
                os.close(self._unmapped.pop(extent_id)[1])
            self.mapped[rank].remove(extent_id)

    def _report_released(self, rank: int, extent_ids: Sequence[int]) -> None:
        """On the attach server's thread."""
        self.released(rank, extent_ids)
        self._memory.do(self._memory.release, self.client(rank), extent_ids)

    # -- transfers: the tier's thread -----------------------------------------------------------------------

    def submit(self, control: TierSession, plans: Iterable[tuple[int, TierOp]]) -> None:
        for rank, op in plans:
            self._transfers.submit(op, self.mapped[rank], rank, len(self.mapped), partial(self._note, control, rank))

    def _note(self, control: TierSession, rank: int, completion: TierCompletion) -> None:
        self._ended.append((control, rank, completion))
        self._on_news()

    def take_completions(self) -> None:
        """Report the end of each op to its namespace's session."""
        while self._ended:
            control, rank, completion = self._ended.popleft()
            control.complete(rank, control.boot_id, (completion,))

    def retire(self, control: TierSession) -> None:
        """Close the session of a namespace that is gone. No transfer is under way in it."""
        with self._lock:
            self._controls.remove(control)
        control.close()

    # -- the end --------------------------------------------------------------------------------------------

    def begin_end(self, then: Callable[[], object]) -> None:
        """Take no more memory, end all transfers, and release everything; then call `then` on the thread that may
        wait."""
        try:
            self._memory.do(self._memory.lose_session, self)
        finally:
            self._do_later(partial(self._close, then))

    def _close(self, then: Callable[[], object]) -> None:
        self._is_closed = True
        try:
            with ExitStack() as stack:  # each is done, also after an error; the last one first
                stack.callback(self._close_fds)
                for mapped in self.mapped.values():
                    stack.callback(mapped.clear)
                stack.callback(self._transfers.drop, self.mapped.values())
        except Exception:  # noqa: BLE001 - the pool's memory must be released all the same
            self.note_defect("the end of its transfers")
        finally:
            then()

    def _close_fds(self) -> None:
        unmapped, self._unmapped = self._unmapped, {}  # what the memory thread still pushes finds nothing
        close_fds([fd for _, fd, _ in unmapped.values()])

    def note_defect(self, what: str) -> None:
        """Log the exception that is being handled, and count it. From any thread."""
        logger.exception("the tier of pool %s: %s has failed", self.pool.name, what)
        self.pool.facade.count_error("host")

    def end_sessions(self) -> None:
        """Call after `begin_end`, when no process touches the pool's memory for the transfers any more."""
        with self._lock:
            controls = list(self._controls)
        for control in controls:
            control.lose("the node service has closed the store")
        for rank in self.mapped:
            client = self.client(rank)
            self.pool.process_died(client)
            self._memory.do(self._memory.end_client, client)
