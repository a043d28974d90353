"""The thread of the node's memory: it decides which pool has what, and carries that out."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from kvstow.attach.connection import Message
from kvstow.attach.deposits import DepositedDescriptors, DroppedDescriptors
from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.bytesize import format_size
from kvstow.control.indexjournal import IndexJournal
from kvstow.errors import AttachRefusedError
from kvstow.memfd import MemfdIdentity, identify_memfd
from kvstow.memory.nodememory import NodeMemory
from kvstow.memory.rows import PoolLayout
from kvstow_service.node.pools.nodepool import NodePool
from kvstow_service.node.pools.noderecords import NodeRecords
from kvstow_service.node.pools.nodesession import NodeSession
from kvstow_service.node.pools.poolmemory import PoolMemory, PoolWorker, Post
from kvstow_service.node.survival.handover import WORKER_PREFIX
from kvstow_service.node.survival.keepermessages import Held
from kvstow_service.node.survival.poolrecord import PoolRecord
from kvstow_service.node.survival.survivingmemory import SurvivingMemory
from kvstow_service.node.survival.workerrecord import WorkerRecord

_RETRY_SECONDS = 0.02
_KEEPER_SECONDS = 1.0  # between two looks whether it is still there
_ROUNDS = 1000

logger = logging.getLogger("kvstow.node")


class MemoryThread:
    """Owns the budget and the `NodeMemory`: nothing else uses them while it runs.

    It may wait, and no other thread waits for it: for the populator, for the keeper, for the kernel that frees memory.
    All methods may be called from any thread and only leave an action for it; actions run in the order of the calls.
    `run_pending` is the thread's own, and for tests without the thread.
    """

    def __init__(
        self,
        memory: NodeMemory,
        post: Post,
        *,
        on_smaller: Callable[[NodePool], object] = lambda pool: None,
        on_empty: Callable[[NodePool], object] = lambda pool: None,
        on_failure: Callable[[str], object] = lambda reason: None,
    ) -> None:
        """`post`: has the attach server's thread call something, as it calls `on_smaller` with a pool that has lost
        slots. `on_empty` is called on this thread while a pool has neither memory nor workers."""
        self.memory = memory
        self.failure: str | None = None
        """Why the thread has ended, if it has."""
        self.faults = 0
        """Actions that failed by a defect. They are in the log."""
        self.notices: tuple[str, ...] = ()
        """Why memory that pools should get or give back must wait, as sentences."""
        self.failures: tuple[str, ...] = ()
        """Why workers lack the memory of their pools, as sentences."""
        self.allocated_bytes = self.spare_bytes = self.recalled_bytes = 0
        self._budget = memory.budget
        self._post = post
        self._on_smaller, self._on_empty, self._on_failure = on_smaller, on_empty, on_failure
        self._pools: dict[str, PoolMemory] = {}
        self._actions: deque[Callable[[], object]] = deque()
        self._must_decide = True
        self._has_revoked_all = False
        self._wake = threading.Event()
        self._stopping = False
        self._records: NodeRecords | None = None
        self._keeper: SurvivingMemory | None = None
        self._placed: dict[MemfdIdentity, tuple[str, int]] = {}
        """Pool, and place in the row, of the extents in rows that were not recalled. Replaced as a whole."""
        self._claims: dict[str, set[str]] = {}
        """By pool: the sessions of an earlier service that may come back for its memory."""
        self._thread = threading.Thread(target=self._run, name="kvstow-memory", daemon=True)
        memory.populator.add_listener(self._wake.set)

    def start(self) -> None:
        self._wake.set()  # to make the extents
        self._thread.start()

    def close(self) -> None:
        """End the thread; idempotent. The memory stays as it is."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def close_records(self) -> None:
        """After the threads that use pools have ended; idempotent. The keeper has them still."""
        for action in self._actions:
            if isinstance(action, partial) and action.func == self._add_worker and action.args[-1] >= 0:
                os.close(action.args[-1])
        self._actions.clear()
        if self._records is not None:
            self._records.close([found.pool for found in self._pools.values()])

    # -- an earlier life: before the start ------------------------------------------------------------------

    def use_keeper(self, keeper: SurvivingMemory) -> None:
        """What the node has survives the service from now on. The keeper stays the caller's."""
        self.memory.keeper = self._keeper = keeper
        most_bytes = max(self.total_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        self._records = NodeRecords(keeper, most_bytes)

    def restore_pool(self, pool: NodePool, record: PoolRecord, journal: IndexJournal) -> None:
        """Takes over the journal."""
        assert self._records is not None
        self._enter_pool(pool, record.owner, record.extent_bytes)
        self._records.restore_pool(pool, journal)

    def restore_extents(self, kept: Mapping[str, Held], pools: Iterable[str]) -> list[int]:
        """After the pools, which have had none. Takes over the descriptors; returns the numbers of the extents."""
        restored = self.memory.restore(kept)
        for name in pools:
            self._pools[name].restore()
        return restored

    def restore_worker(self, record: WorkerRecord, pidfd: int) -> None:
        """One that may have mapped all memory of its rank. Until engines have attached again, it asks for memory in the
        name of its session. After the extents. Takes over the pidfd."""
        assert self._records is not None
        self._records.restore_worker(record, pidfd)
        rows, place = self._budget.rows(record.pool), self._pools[record.pool].pool.place_of(record.rank)
        for number in range(self._budget.num_sound_rows(record.pool)):
            self._budget.record_mapping(record.client, rows[number].extents[place])
        self._budget.attach(record.pool, record.session_id, record.wanted_slots)
        self._claims.setdefault(record.pool, set()).add(record.session_id)
        self._pools[record.pool].want()

    @property
    def next_extent(self) -> int:
        """Of the extents that are restored next: the number of the first."""
        return self._budget.next_extent

    def settle_restored(self) -> None:
        """After the extents and workers of an earlier service: their pools use them."""
        self._must_decide = True
        self._guarded(self.memory.apply)
        for found in list(self._pools.values()):
            self._guarded(partial(self._follow, found))

    def keep_restored(self, workers: Sequence[WorkerRecord], extents: Sequence[int], pools: Sequence[NodePool]) -> None:
        """Give the keeper what engines have handed back: the journals last, as nothing is recovered without one."""
        assert self._records is not None
        self._records.keep_workers(workers)
        self.memory.keep(extents)
        self.keep_journals(pools)

    def keep_journals(self, pools: Sequence[NodePool]) -> None:
        """The pools were recovered: their journals, which are copies, take the place of those at the keeper."""
        assert self._records is not None
        for pool in pools:
            self._records.keep_journal(pool)

    # -- for any thread -------------------------------------------------------------------------------------

    @property
    def extent_bytes(self) -> int:
        return self._budget.extent_bytes

    @property
    def total_bytes(self) -> int:
        """The node's budget."""
        return self._budget.total_bytes

    def require_room(self, layout: PoolLayout) -> None:
        """Raises `AttachRefusedError` if the node cannot have a single slot of such a pool."""
        if layout.bytes_of(1) > self.total_bytes:
            raise AttachRefusedError(
                "memory",
                f"one slot on all ranks takes {format_size(layout.bytes_of(1))}, and the node service has "
                f"{format_size(self.total_bytes)}: give it more with --memory",
            )

    def has_placed(self, pool: NodePool, rank: int, fd: int) -> bool:
        """Whether this descriptor is an extent that the rank has in the pool."""
        return self._placed.get(identify_memfd(fd)) == (pool.name, pool.place_of(rank))

    def add_pool(self, pool: NodePool, owner: int) -> None:
        self._do(partial(self._add_pool, pool, owner))

    def remove_pool(self, pool: NodePool) -> None:
        """It has no sessions, and nobody can find it any more."""
        self._do(partial(self._remove_pool, pool))

    def add_worker(self, session: NodeSession, hello: Hello, peer: Peer) -> None:
        """Give the worker the pool's memory from now on. Raises `OSError` if this process can have no more
        descriptors."""
        record, pidfd = None, -1
        if self._records is not None:
            record = session.worker_record(hello, peer)
            pidfd = os.open(os.devnull, os.O_RDONLY) if peer.pidfd is None else os.dup(peer.pidfd)
        self._do(partial(self._add_worker, session, hello.rank, record, pidfd))

    def add_session(self, session: NodeSession, slots: int | None) -> None:
        """The session asks for so many slots, or for all: its pool is not without sessions any more."""
        self._do(partial(self._budget.attach, session.pool.name, session.session_id, slots))

    def start_session(self, session: NodeSession) -> None:
        """All workers of the session are there: its pool gets a row, if it has none."""
        self._do(partial(self._start_session, session.pool, session.numa_nodes()))

    def lose_session(self, session: NodeSession) -> None:
        """Give its workers nothing any more. They may still use what they have."""
        self._do(partial(self._lose_session, session))

    def release(self, client: str, extents: Sequence[int]) -> None:
        """The worker has let go of these."""
        self._do(partial(self._release, client, tuple(extents)))

    def end_client(self, client: str) -> None:
        """The worker can reach no memory any more."""
        self._do(partial(self._end_client, client))

    def end_claims(self, pool: NodePool) -> None:
        """The pool has no sessions any more."""
        self._do(partial(self._end_claims, pool.name))

    def grow(self, pool: NodePool) -> None:
        """The pool uses more than `grow_above`."""
        self._do(partial(self._grow, pool))

    def revoke_all(self, then: Callable[[], object]) -> None:
        """The service ends: ask all workers to let go of everything, give them nothing from now on, and call `then`."""
        self._do(self._revoke_all)
        self._do(then)

    def run(self, action: Callable[[], object]) -> None:
        """Call this on the thread, in the order of the calls."""
        self._do(action)

    def look_again(self) -> None:
        """Something that memory may have waited for has changed."""
        self._wake.set()

    def retry(self) -> None:
        """Try again what memory was refused for."""
        self._do(self.memory.retry)

    def check_integrity(self) -> None:
        """Compare the books of the memory; a contradiction counts as a fault."""
        self._do(self._budget.check_integrity)

    def _do(self, action: Callable[[], object]) -> None:
        self._actions.append(action)
        self._wake.set()

    # -- actions --------------------------------------------------------------------------------------------

    def _add_pool(self, pool: NodePool, owner: int) -> None:
        self._enter_pool(pool, owner, self._budget.extent_bytes)
        if self._records is not None:
            self._records.add_pool(pool, owner, self._budget.extent_bytes)

    def _enter_pool(self, pool: NodePool, owner: int, extent_bytes: int) -> None:
        self._budget.add_pool(pool.name, pool.layout(owner, extent_bytes))
        self._budget.want(pool.name, 0)  # until all workers of an engine are there
        on_smaller = partial(self._on_smaller, pool)
        self._pools[pool.name] = PoolMemory(pool, self.memory, self._post, on_smaller, self._deposit)

    def _remove_pool(self, pool: NodePool) -> None:
        self._budget.remove_pool(pool.name)
        found = self._pools.pop(pool.name)
        self.memory.apply()
        found.dissolve()
        self.memory.apply()
        if self._records is not None:
            self._records.remove_pool(pool)

    def _add_worker(self, session: NodeSession, rank: int, record: WorkerRecord | None, pidfd: int) -> None:
        if record is not None and self._records is not None:
            self._records.add_worker(record, pidfd)
            if record.has_pidfd:
                self._tell_peers(
                    record.pool, DepositedDescriptors((f"{WORKER_PREFIX}{record.client}",), False), [pidfd]
                )
        worker = PoolWorker(session, rank)
        self._pools[session.pool.name].workers[worker.client] = worker

    def _end_client(self, client: str) -> None:
        self._budget.record_death(client)
        if self._records is not None:
            pool = self._records.remove_worker(client)
            if pool is not None:
                self._tell_peers(pool, DroppedDescriptors((f"{WORKER_PREFIX}{client}",)))

    def _deposit(self, worker: PoolWorker) -> None:
        """Give the worker what the next service needs if the keeper is killed, too."""
        if self._records is None:
            return
        worker.has_deposits = True
        held = self._records.deposits(worker.session.pool.name, worker.client)
        self._tell(worker, DepositedDescriptors(tuple(held), True), list(held.values()))

    def _tell_peers(self, pool: str, message: Message, fds: Sequence[int] = ()) -> None:
        """Bring up to date what the pool's workers hold."""
        found = self._pools.get(pool)
        for worker in () if found is None else found.workers.values():
            if worker.has_deposits:
                self._tell(worker, message, fds)

    @staticmethod
    def _tell(worker: PoolWorker, message: Message, fds: Sequence[int]) -> None:
        try:
            worker.session.link.push(message, rank=worker.rank, fds=fds)
        except OSError as error:  # the next service waits for the word of a worker that nobody has a pidfd of
            logger.warning("worker %s holds less for the next service: %s", worker.client, error.strerror or error)

    def _end_claims(self, pool: str) -> None:
        for session_id in self._claims.pop(pool, ()):
            self._budget.detach(pool, session_id)

    def _start_session(self, pool: NodePool, nodes: list[int | None]) -> None:
        self._budget.set_nodes(pool.name, nodes[: len(pool.stored_slot_bytes)])
        self._end_claims(pool.name)
        self._pools[pool.name].want()

    def _revoke_all(self) -> None:
        self._has_revoked_all = True
        for name, found in self._pools.items():
            self._tell_peers(name, DepositedDescriptors((), True))
            found.revoke_all()

    def _lose_session(self, session: NodeSession) -> None:
        found = self._pools[session.pool.name]
        for client in session.clients():
            found.workers.pop(client, None)
        self._budget.detach(session.pool.name, session.session_id)

    def _release(self, client: str, extents: Sequence[int]) -> None:
        for extent in extents:
            self._budget.record_unmapping(client, extent)

    def _grow(self, pool: NodePool) -> None:
        if pool.name in self._pools:
            self._pools[pool.name].want()

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait(self._patience())
                self._wake.clear()
                if self._keeper is not None:
                    self._guarded(self._keeper.check)
                if not self._stopping:
                    self.run_pending()
        except BaseException as error:
            self.failure = f"the thread of the node's memory has failed: {error!r}"
            logger.critical("%s", self.failure, exc_info=error)
            with suppress(Exception):
                self._on_failure(self.failure)

    def _patience(self) -> float | None:
        if any(pool.waits for pool in self._pools.values()):
            return _RETRY_SECONDS
        return None if self._keeper is None else _KEEPER_SECONDS

    def run_pending(self) -> None:
        """Do what was left to do, and let pools and workers follow."""
        for _ in range(len(self._actions)):
            self._guarded(self._actions.popleft())
            self._must_decide = True
        decided = self._must_decide
        for _ in range(_ROUNDS):
            if self._must_decide:
                self._must_decide = False
                self._guarded(self.memory.apply)
                self._guarded(self._note_extents)
            for pool in list(self._pools.values()):
                self._guarded(partial(self._follow, pool))
            if not self._must_decide:
                break
        if decided:
            self._placed = dict(self._places())
        self._show_figures()

    def _note_extents(self) -> None:
        """For the next service, before a worker gets them."""
        if self._records is None:
            return
        for name in self._pools:
            rows = self._budget.rows(name).values()
            numbers = [number for row in rows if not row.recalled for number in row.extents]
            there = [self.memory.described(number) for number in numbers if self.memory.extent(number) is not None]
            self._records.set_extents(name, there)

    def _places(self) -> Iterator[tuple[MemfdIdentity, tuple[str, int]]]:
        for name in self._pools:
            for row in self._budget.rows(name).values():
                for place, number in enumerate(row.extents):
                    extent = self.memory.extent(number)
                    if extent is not None and not row.recalled:
                        yield extent.identity, (name, place)

    def _follow(self, found: PoolMemory) -> None:
        if self._has_revoked_all:
            return
        if found.follow():
            self._must_decide = True
        if found.is_empty:
            self._on_empty(found.pool)

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception:
            self.faults += 1
            logger.exception("a change of the node's memory failed")

    def _show_figures(self) -> None:
        self.notices = tuple(pool.notice for pool in self._pools.values() if pool.notice)
        failures = [pool.failure for pool in self._pools.values() if pool.failure]
        if self._records is not None:
            failures += self._records.problems.values()
        if self._keeper is not None and self._keeper.notice is not None:
            failures.append(self._keeper.notice)
        self.failures = tuple(failures)
        self.allocated_bytes, self.spare_bytes = self._budget.allocated_bytes, self._budget.spare_bytes
        self.recalled_bytes = self._budget.recalled_bytes
        due = self._budget.fair_shares()
        for name, found in self._pools.items():
            found.pool.granted_bytes = self._budget.granted_bytes(name)
            found.pool.due_bytes = due.get(name, 0)
