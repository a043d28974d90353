"""What the fleet tier has of one pool: its memory, and the transfers of its ranks."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from kvstow.attach.channel import close_fds
from kvstow.attach.connection import Message
from kvstow.attach.extentcalls import ExtentBytes, ExtentGrant, ExtentSlots, GrantedExtents, PopulatedExtents
from kvstow.attach.extentcalls import RevokedExtents as Revoked
from kvstow.attach.peer import Peer
from kvstow.control.attachedsession import TierSession
from kvstow.messages import TierCompletion, TierOp
from kvstow.tier.objectname import names_of_rank
from kvstow.tier.ranktransfers import RankTransfers
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool
from kvstow_service.node.tier.actionthread import ActionThread
from kvstow_service.node.tier.mappedrank import MappedRank
from kvstow_service.node.tier.sharedclients import SharedTransfers
from kvstow_service.node.tier.tiermember import TierMember

if TYPE_CHECKING:
    from kvstow_service.node.tier.namespacetier import NamespaceTier

logger = logging.getLogger("kvstow.tier")


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
        self._owners: dict[int, NamespaceTier] = {}
        """Of each op under way."""
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

    def submit(self, owner: NamespaceTier, plans: Iterable[tuple[int, TierOp]]) -> None:
        for rank, op in plans:
            self._owners[op.op_id] = owner
            self.transfers[rank].submit(op)

    def take_completions(self) -> None:
        """Give each namespace's session the ends of its ops."""
        for rank, transfers in self.transfers.items():
            for completion in transfers.take_completions():
                self._complete(rank, completion)

    def _complete(self, rank: int, completion: TierCompletion) -> None:
        owner = self._owners[completion.op_id]
        control = owner.control
        control.complete(rank, control.boot_id, (completion,))
        with self.pool.lock:
            if control.ops.get(completion.op_id) is None:
                del self._owners[completion.op_id]

    def retire(self, tier: NamespaceTier) -> None:
        """Its namespace is gone, and nothing is under way in it."""
        self.member.discard(tier.control)
        tier.control.close()

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
