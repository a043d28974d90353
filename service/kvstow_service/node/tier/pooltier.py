"""What the fleet tier has of one pool: its memory, and the transfers of its ranks."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvstow.attach.calls import ExtentBytes, ExtentGrant, ExtentSlots, GrantedExtents, PopulatedExtents
from kvstow.attach.calls import RevokedExtents as Revoked
from kvstow.attach.channel import close_fds
from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.attach.wire import Message
from kvstow.control.attachedsession import TierSession
from kvstow.errors import CopyError, TierUnavailableError
from kvstow.messages import TierCompletion, TierOp
from kvstow.tier.objectname import ObjectName, names_of_rank
from kvstow.tier.ranktransfers import RankTransfers
from kvstow.tier.rate import TransferRate
from kvstow.tier.store import (
    ClientHealth,
    ClientStats,
    GetStatus,
    LookupClient,
    MemoryRange,
    PutStatus,
    SlotObject,
    TransferClient,
)
from kvstow_service.node.attach.sessionhost import SessionLink
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool
from kvstow_service.node.pools.nodesession import NodeSession

logger = logging.getLogger("kvstow.tier")


class ActionThread:
    """`do` never waits. An action that raises is logged; those after it are done."""

    def __init__(self, name: str) -> None:
        self._actions: deque[Callable[[], object]] = deque()
        self._state = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, action: Callable[[], object]) -> None:
        with self._state:
            self._actions.append(action)
            self._state.notify_all()

    def close(self) -> None:
        """Do what is left, and end the thread. Idempotent."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._actions or self._closing)
                if not self._actions:
                    return
                action = self._actions.popleft()
            try:
                action()
            except Exception:
                logger.exception("an action on thread %s has failed; the others go on", self._thread.name)


_S = TypeVar("_S")


class SharedTransfers:
    """The transfers of all ranks and pools of the node, through one client, and so one process. Thread-safe.

    One call of each kind at a time, as the client demands; the others wait for their turn. So a call's timeout follows
    from the rate that is measured here: a rank only sees how long it takes with all others.
    """

    def __init__(self, client: TransferClient) -> None:
        """Closes the client in `close`."""
        self.client = client
        self._turns = {"put": Lock(), "get": Lock()}
        self._rates = {"put": TransferRate(), "get": TransferRate()}

    def open(self) -> RankClient:
        """For one rank of one pool."""
        return RankClient(self)

    def close(self) -> None:
        """Everything under way has ended when this returns. Idempotent."""
        self.client.close()

    def move(self, kind: str, objects: Sequence[SlotObject], call: Callable[[float], list[_S]], good: str) -> list[_S]:
        """Make a call, with its timeout, when it is its turn."""
        num_bytes = sum(one.num_bytes for one in objects)
        rate = self._rates[kind]
        with self._turns[kind]:
            begun = time.monotonic()
            statuses = call(rate.timeout(num_bytes))
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
        with self._busy["put"]:
            self._require_open()
            return self._shared.move("put", objects, lambda limit: self._shared.client.put(objects, limit), "stored")

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        with self._busy["get"]:
            self._require_open()
            return self._shared.move("get", objects, lambda limit: self._shared.client.get(objects, limit), "found")

    def health(self) -> ClientHealth:
        return ClientHealth("closed", "it was closed") if self._is_closed else self._shared.client.health()

    def stats(self) -> ClientStats:
        """Of the node's client."""
        return self._shared.client.stats()

    def close(self) -> None:
        self._is_closed = True
        for busy in self._busy.values():
            with busy:
                pass

    def _require_open(self) -> None:
        if self._is_closed:
            raise TierUnavailableError("the client was closed")


class SharedLookups:
    """A `LookupClient` of one namespace, over the one of the node, which stays open. `exists` is called by one thread
    at a time. Thread-safe."""

    def __init__(self, client: LookupClient, turn: Lock) -> None:
        """`turn`: the same for all that share the client."""
        self._client, self._turn = client, turn
        self._is_closed = False

    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        with self._turn:
            if self._is_closed:
                raise TierUnavailableError("the client was closed")
            return self._client.exists(names, timeout)

    def health(self) -> ClientHealth:
        return self._client.health()

    def stats(self) -> ClientStats:
        return self._client.stats()

    def close(self) -> None:
        self._is_closed = True


class _Mapped(NamedTuple):
    grant: ExtentGrant
    map: mmap.mmap
    memory: MemoryRange


class MappedRank:
    """The `SlotMemory` of one rank, made of extents that come and go. One thread changes it, and any may read.

    This process maps the extents, too, as some clients of stores copy in it; it touches no byte of them itself, so
    they do not count in its resident size. An extent goes only when no block of its slots is left in the pool and no op
    uses them, so nothing has to be held here.
    """

    def __init__(self, slot_bytes: int, client: TransferClient) -> None:
        """The client stays the caller's."""
        self.slot_bytes = slot_bytes
        self._client = client
        self._stride = slot_bytes
        self._extents: tuple[_Mapped, ...] = ()
        """In the order of their slots."""

    def add(self, grant: ExtentGrant, fd: int, slot_stride: int) -> None:
        """An extent that is populated. The caller keeps the descriptor. Raises `OSError` or `KvstowError`."""
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
        """No process maps the extent for the transfers any more when this returns; one that was not added is
        ignored."""
        gone = [one for one in self._extents if one.grant.extent_id == extent_id]
        self._extents = tuple(one for one in self._extents if one not in gone)
        for one in gone:
            self._client.remove_memory(one.memory)
            one.map.close()

    def clear(self) -> None:
        """`remove` all of them. After an error the others are removed, too; then it is raised."""
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


class TierMember(NodeSession):
    """Gets the pool's extents, lets go of them when they are recalled, and is recorded for the next service. It is no
    engine: the host does not list it, and it asks for no memory.

    `control` has the processes, and `add` gives it more sessions, one for each namespace, with the same memory. What
    processes may use memory is set before they get any. `add` and `discard` may be called from any thread.
    """

    is_engine = False

    def __init__(
        self, pool: NodePool, namespace: KnownNamespace, control: TierSession, make_link: Callable[[str], SessionLink]
    ) -> None:
        session_id = secrets.token_hex(8)
        hello = Hello(
            role="scheduler",
            engine=ENGINE,
            host=socket.gethostname(),
            pid=os.getpid(),
            pool=pool.identity,
            namespace=namespace.identity,
            token=secrets.token_hex(16),
        )
        peer = Peer(os.getpid(), os.geteuid(), os.getegid(), None)
        super().__init__(session_id, hello, peer, make_link(session_id), pool, namespace, control)
        control.name, control.label = ENGINE, f"{ENGINE}: "
        self.tier_ranks = sorted(pool.storing_ranks)
        """Those that have objects of their own in the store."""
        self._lock = Lock()
        self._controls: list[TierSession] = [control]
        self._clients: set[str] = set()
        self._registered = self._applied = 0

    def wanted_slots(self) -> int:
        """As few as can be said: it uses what the engines have."""
        return 1

    def worker_hello(self, rank: int) -> Hello:
        return Hello(
            role="worker", engine=ENGINE, host=self.hello.host, pid=self.pid, rank=rank, token=self.hello.token
        )

    def add(self, control: TierSession) -> None:
        """A session of another namespace."""
        with self._lock:
            for client in self._clients:
                control.map_memory(client)
            self._controls.append(control)
            control.set_registered(self._registered, self._applied)

    def discard(self, control: TierSession) -> None:
        with self._lock:
            self._controls.remove(control)

    def controls(self) -> list[TierSession]:
        with self._lock:
            return list(self._controls)

    def note_client(self, client: str) -> None:
        """It will get memory."""
        with self._lock:
            self._clients.add(client)
            for control in self._controls:
                control.map_memory(client)

    def _tell_control(self, rank: int) -> None:
        memories = [self._follow_pool(one) for one in self.tier_ranks]
        with self._lock:
            self._registered = min(memory.registered_slots for memory in memories)
            self._applied = min(memory.applied for memory in memories)
            for control in self._controls:
                control.set_registered(self._registered, self._applied)


class _Extent:
    """One that was granted. `fd` is this object's until it is mapped, then -1."""

    def __init__(self, grant: ExtentGrant, fd: int, slot_stride: int) -> None:
        self.grant, self.fd, self.slot_stride = grant, fd, slot_stride
        self.is_mapped = False


class PoolTier:
    """It is its own `SessionLink`: the memory thread grants and revokes extents as it does for an engine's workers.

    An extent is mapped once all of it is populated, on a thread that may wait for the process that maps it. It is
    reported as released once no process of the transfers maps it. Until then no other session gets it.

    `submit`, `take_completions`, `retire`, `begin_end` and `end_sessions` are for the tier's thread.
    """

    def __init__(
        self,
        pool: NodePool,
        namespace: KnownNamespace,
        control: TierSession,
        shared: SharedTransfers,
        memory: MemoryThread,
        mapper: ActionThread,
        post: Callable[[Callable[[], object]], object],
        on_news: Callable[[], None],
    ) -> None:
        self.pool = pool
        self._memory, self._mapper, self._post = memory, mapper, post
        self.session_id = ""
        self.member = TierMember(pool, namespace, control, self._named)
        ranks = self.member.tier_ranks
        clients = {rank: shared.open() for rank in ranks}
        self.mapped = {rank: MappedRank(pool.config.slot_bytes_of(rank), clients[rank]) for rank in ranks}
        self.transfers = {
            rank: RankTransfers(self.mapped[rank], clients[rank], names_of_rank(rank, len(ranks)), on_news=on_news)
            for rank in ranks
        }
        self._extents: dict[int, _Extent] = {}
        self._controls: dict[int, TierSession] = {}
        """The session of each op under way."""
        self._is_closed = False
        self.problem: str | None = None
        """Why some of the pool's memory is not mapped for the transfers: its blocks are neither put nor fetched."""
        self.has_ended = threading.Event()
        """Nothing of the pool's memory is mapped for the transfers, and nothing is under way."""

    def _named(self, session_id: str) -> PoolTier:
        self.session_id = session_id
        return self

    def join(self, end: int | None) -> None:
        """Ask for the pool's extents. `end`: becomes readable when no process has them for the transfers any more, for
        the next service."""
        for rank in self.member.tier_ranks:
            peer = Peer(os.getpid(), os.geteuid(), os.getegid(), end)
            self._memory.add_worker(self.member, self.member.worker_hello(rank), peer)

    # -- memory ---------------------------------------------------------------------------------------------

    def push(self, message: Message, *, rank: int | None = None, fds: Sequence[int] = ()) -> None:
        """On the memory thread: see `SessionLink`."""
        if rank is None:
            return
        match message:
            case GrantedExtents():
                copies = _copied(fds)
                self.member.note_client(self.member.client(rank))
                self._mapper.do(partial(self._take, rank, message.slot_stride, message.extents, copies))
            case PopulatedExtents():
                self._mapper.do(partial(self._note_populated, rank, message.extents))
            case Revoked():
                self._mapper.do(partial(self._let_go, rank, message.extent_ids))

    def _take(self, rank: int, stride: int, grants: Sequence[ExtentGrant], fds: Sequence[int]) -> None:
        if self._is_closed:
            close_fds(fds)
            return
        for grant, fd in zip(grants, fds, strict=True):
            self._extents[grant.extent_id] = _Extent(grant, fd, stride)
        self._note_populated(rank, [ExtentBytes(grant.extent_id, grant.populated_bytes) for grant in grants])

    def _note_populated(self, rank: int, extents: Iterable[ExtentBytes]) -> None:
        for extent_id, num_bytes in extents:
            found = self._extents.get(extent_id)
            if found is None or found.is_mapped or num_bytes < found.grant.num_bytes:
                continue
            try:
                self.mapped[rank].add(found.grant, found.fd, found.slot_stride)
            except Exception as error:  # noqa: BLE001 - the other extents are mapped
                self.problem = f"memory of rank {rank} could not be mapped: {error}"
                self.note_defect("the mapping of memory")
                continue
            found.is_mapped = True
            os.close(found.fd)
            found.fd = -1
            told = [ExtentSlots(extent_id, found.grant.num_slots)]
            self._post(partial(self.member.registered, rank, told))

    def _let_go(self, rank: int, extent_ids: Sequence[int]) -> None:
        for extent_id in extent_ids:
            self._unmap(rank, extent_id)
        self._post(partial(self._say_let_go, rank, tuple(extent_ids)))

    def _unmap(self, rank: int, extent_id: int) -> None:
        found = self._extents.pop(extent_id, None)
        self.mapped[rank].remove(extent_id)
        if found is not None and found.fd >= 0:
            os.close(found.fd)

    def _say_let_go(self, rank: int, extent_ids: Sequence[int]) -> None:
        """On the attach server's thread."""
        self.member.released(rank, extent_ids)
        self._memory.release(self.member.client(rank), extent_ids)

    # -- transfers: the tier's thread -----------------------------------------------------------------------

    def submit(self, control: TierSession, plans: Iterable[tuple[int, TierOp]]) -> None:
        for rank, op in plans:
            self._controls[op.op_id] = control
            self.transfers[rank].submit(op)

    def take_completions(self) -> None:
        """Give each namespace's session the ends of its ops."""
        for rank, transfers in self.transfers.items():
            for completion in transfers.take_completions():
                self._complete(rank, completion)

    def _complete(self, rank: int, completion: TierCompletion) -> None:
        control = self._controls[completion.op_id]
        control.complete(rank, control.boot_id, (completion,))
        with self.pool.lock:
            if control.ops.get(completion.op_id) is None:
                del self._controls[completion.op_id]

    def retire(self, control: TierSession) -> None:
        """Its namespace is gone, and nothing is under way in it."""
        self.member.discard(control)
        control.close()

    # -- the end --------------------------------------------------------------------------------------------

    def begin_end(self, then: Callable[[], object]) -> None:
        """Take no memory any more, end all transfers, and let go of everything; then call `then`, on the thread that
        may wait."""
        try:
            self._memory.lose_session(self.member)
        finally:
            self._mapper.do(partial(self._close, then))

    def _close(self, then: Callable[[], object]) -> None:
        self._is_closed = True
        try:
            with ExitStack() as stack:  # all of it is done, the last one first
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
        waiting = deque(found.fd for found in self._extents.values() if found.fd >= 0)
        self._extents.clear()
        close_fds(waiting)

    def note_defect(self, what: str) -> None:
        """Log the exception that is being handled, and count it. From any thread."""
        logger.exception("the tier of pool %s: %s has failed", self.pool.name, what)
        self.pool.facade.count_error("host")

    def end_sessions(self) -> None:
        """After `begin_end`: nothing touches the pool's memory for the transfers any more."""
        for control in self.member.controls():
            control.lose("the node service has let go of the store")
        for rank in self.member.tier_ranks:
            client = self.member.client(rank)
            self.pool.process_died(client)
            self._memory.end_client(client)


def _copied(fds: Sequence[int]) -> list[int]:
    """Duplicates. Raises `OSError`, and makes none."""
    copies = list[int]()
    try:
        copies.extend(os.dup(fd) for fd in fds)
    except OSError:
        close_fds(copies)
        raise
    return copies
