"""The fleet tier's view of one pool: its memory, and the transfers of its ranks."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvstow.attach.calls import ExtentBytes, ExtentGrant, ExtentSlots, GrantedExtents, PopulatedExtents
from kvstow.attach.calls import RevokedExtents as Revoked
from kvstow.attach.channel import close_fds, duplicates_of
from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.attach.wire import Message
from kvstow.control.attachedsession import TierSession
from kvstow.errors import CopyError, TierUnavailableError
from kvstow.messages import TierOp
from kvstow.tier.ranktransfers import RankTransfers
from kvstow.tier.rate import TransferRate
from kvstow.tier.store import (
    ClientHealth,
    ClientStats,
    GetStatus,
    MemoryRange,
    PutStatus,
    SlotObject,
    TransferClient,
    names_of_rank,
)
from kvstow_service.node.pools.memoryholder import MemoryHolder
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool

logger = logging.getLogger("kvstow.tier")


_S = TypeVar("_S")
_Call = Callable[[Sequence[SlotObject], float], list[_S]]


class SharedTransfers:
    """The transfers of all ranks and pools of the node, through one client, and so one process. Thread-safe.

    The client allows one call of each kind at a time; the others wait for their turn. So a call's timeout follows from
    the rate that is measured here: a rank sees only how long a call takes together with its wait.
    """

    def __init__(self, client: TransferClient) -> None:
        """Owns the client."""
        self.client = client
        self._turns = {"put": Lock(), "get": Lock()}
        self._rates = {"put": TransferRate(), "get": TransferRate()}

    def close(self) -> None:
        """When this returns, all calls under way have ended. Idempotent."""
        self.client.close()

    def move(self, kind: str, objects: Sequence[SlotObject], call: _Call[_S], good: str) -> list[_S]:
        """Make a call with its timeout once it is its turn."""
        num_bytes = sum(one.num_bytes for one in objects)
        rate = self._rates[kind]
        with self._turns[kind]:
            begun = time.monotonic()
            statuses = call(objects, rate.timeout(num_bytes))
            if statuses.count(good) == len(statuses):  # type: ignore[arg-type]  # both are texts
                rate.observe(num_bytes, time.monotonic() - begun)
            return statuses


class RankClient:
    """The `TransferClient` of one rank of one pool: its memory, and its share of the node's client."""

    def __init__(self, shared: SharedTransfers) -> None:
        self._shared = shared
        self._is_closed = False
        self._busy = {"put": Lock(), "get": Lock()}

    def add_memory(self, memory: MemoryRange) -> None:
        self._shared.client.add_memory(memory)

    def remove_memory(self, memory: MemoryRange) -> None:
        self._shared.client.remove_memory(memory)

    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        return self._move("put", objects, self._shared.client.put, "stored")

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        return self._move("get", objects, self._shared.client.get, "found")

    def _move(self, kind: str, objects: Sequence[SlotObject], call: _Call[_S], good: str) -> list[_S]:
        with self._busy[kind]:
            if self._is_closed:
                raise TierUnavailableError("the client was closed")
            return self._shared.move(kind, objects, call, good)

    def health(self) -> ClientHealth:
        return ClientHealth("closed", "it was closed") if self._is_closed else self._shared.client.health()

    def stats(self) -> ClientStats:
        """Those of the node's client."""
        return self._shared.client.stats()

    def close(self) -> None:
        self._is_closed = True
        for busy in self._busy.values():
            with busy:
                pass


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


class _Granted(NamedTuple):
    grant: ExtentGrant
    fd: int
    slot_stride: int


class PoolTier(MemoryHolder):
    """The node's own transfers as a client of a pool's memory, like the workers of an engine. They get the pool's
    extents, release them when they are recalled, and are recorded for the next service. They are no engine: the host
    does not list them, and they ask for one slot, the least that a session can ask for.

    It is its own `SessionLink`, through which the memory thread grants and revokes extents. An extent is mapped once
    all of it is populated, on a thread that may wait for the process that maps it. It is reported as released once no
    process of the transfers maps it. Until then no other session gets it.

    `control` has the processes. `add` registers a session for each namespace, with the same memory, before it gets any.
    `add` and `discard` may be called from any thread. `submit`, `take_completions`, `retire`, `begin_end` and
    `end_sessions` are for the tier's thread.
    """

    def __init__(
        self,
        pool: NodePool,
        namespace: KnownNamespace,
        control: TierSession,
        shared: SharedTransfers,
        memory: MemoryThread,
        do_later: Callable[[Callable[[], object]], object],
        post: Callable[[Callable[[], object]], object],
        on_news: Callable[[], None],
    ) -> None:
        """`do_later` has the thread that may wait call something, and `post` the attach server's thread."""
        super().__init__(secrets.token_hex(8), self, pool, namespace, control, 1)
        control.name, control.label = ENGINE, f"{ENGINE}: "
        self._memory, self._do_later, self._post = memory, do_later, post
        self.storing_ranks = sorted(pool.storing_ranks)
        """The ranks with objects of their own in the store."""
        clients = {rank: RankClient(shared) for rank in self.storing_ranks}
        self.mapped = {rank: MappedRank(pool.config.slot_bytes_of(rank), one) for rank, one in clients.items()}
        self.transfers = {
            rank: RankTransfers(self.mapped[rank], one, names_of_rank(rank, len(clients)), on_news=on_news)
            for rank, one in clients.items()
        }
        self._lock = Lock()
        self._controls: list[TierSession] = [control]
        self._clients: set[str] = set()
        """The names of the workers that get memory."""
        self._registered = self._applied = 0
        self._unmapped: dict[int, _Granted] = {}
        """Extents that were granted and are not mapped yet. This object owns their descriptors."""
        self._sessions: dict[int, TierSession] = {}
        """The session of each op under way."""
        self._is_closed = False
        self.problem: str | None = None
        """Why some of the pool's memory is not mapped for the transfers. Its blocks are neither put nor fetched."""
        self.has_ended = threading.Event()
        """Set when none of the pool's memory is mapped for the transfers, and none is under way."""

    def join(self, end: int | None) -> None:
        """Ask for the pool's extents. `end` becomes readable, also for the next service, when no process has them for
        the transfers any more."""
        host, token = socket.gethostname(), secrets.token_hex(16)
        for rank in self.storing_ranks:
            hello = Hello(role="worker", engine=ENGINE, host=host, pid=os.getpid(), rank=rank, token=token)
            self._memory.add_worker(self, hello, Peer(os.getpid(), os.geteuid(), os.getegid(), end))

    # -- its sessions ---------------------------------------------------------------------------------------

    def add(self, control: TierSession) -> None:
        """Give a session of another namespace the same memory."""
        with self._lock:
            for client in self._clients:
                control.map_memory(client)
            self._controls.append(control)
            control.set_registered(self._registered, self._applied)

    def discard(self, control: TierSession) -> None:
        with self._lock:
            self._controls.remove(control)

    def _note_client(self, client: str) -> None:
        """The worker is about to get memory."""
        with self._lock:
            self._clients.add(client)
            for control in self._controls:
                control.map_memory(client)

    def _update_control(self, rank: int) -> None:
        memories = [self._memory_of(one) for one in self.storing_ranks]
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
            self._unmapped[grant.extent_id] = _Granted(grant, fd, stride)
        self._note_populated(rank, [ExtentBytes(grant.extent_id, grant.populated_bytes) for grant in grants])

    def _note_populated(self, rank: int, extents: Iterable[ExtentBytes]) -> None:
        for extent_id, num_bytes in extents:
            found = self._unmapped.get(extent_id)
            if found is None or num_bytes < found.grant.num_bytes:
                continue
            try:
                self.mapped[rank].add(found.grant, found.fd, found.slot_stride)
            except Exception as error:  # noqa: BLE001 - the other extents are mapped
                self.problem = f"memory of rank {rank} could not be mapped: {error}"
                self.note_defect("the mapping of memory")
                continue
            os.close(self._unmapped.pop(extent_id).fd)
            self._post(partial(self.registered, rank, [ExtentSlots(extent_id, found.grant.num_slots)]))

    def _release(self, rank: int, extent_ids: Sequence[int]) -> None:
        for extent_id in extent_ids:
            self._unmap(rank, extent_id)
        self._post(partial(self._report_released, rank, tuple(extent_ids)))

    def _unmap(self, rank: int, extent_id: int) -> None:
        found = self._unmapped.pop(extent_id, None)
        self.mapped[rank].remove(extent_id)
        if found is not None:
            os.close(found.fd)

    def _report_released(self, rank: int, extent_ids: Sequence[int]) -> None:
        """On the attach server's thread."""
        self.released(rank, extent_ids)
        self._memory.do(self._memory.release, self.client(rank), extent_ids)

    # -- transfers: the tier's thread -----------------------------------------------------------------------

    def submit(self, control: TierSession, plans: Iterable[tuple[int, TierOp]]) -> None:
        for rank, op in plans:
            self._sessions[op.op_id] = control
            self.transfers[rank].submit(op)

    def take_completions(self) -> None:
        """Report the end of each op to its namespace's session."""
        for rank, transfers in self.transfers.items():
            for completion in transfers.take_completions():
                control = self._sessions[completion.op_id]
                control.complete(rank, control.boot_id, (completion,))
                with self.pool.lock:
                    if control.ops.get(completion.op_id) is None:
                        del self._sessions[completion.op_id]

    def retire(self, control: TierSession) -> None:
        """Close the session of a namespace that is gone. No transfer is under way in it."""
        self.discard(control)
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
                for transfers in self.transfers.values():
                    stack.callback(transfers.close)
        except Exception:  # noqa: BLE001 - the pool's memory must be released all the same
            self.note_defect("the end of its transfers")
        finally:
            then()

    def _close_fds(self) -> None:
        granted, self._unmapped = self._unmapped, {}
        close_fds([one.fd for one in granted.values()])

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
        for rank in self.storing_ranks:
            client = self.client(rank)
            self.pool.process_died(client)
            self._memory.do(self._memory.end_client, client)
