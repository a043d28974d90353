"""The memory thread: it decides how much of the node's memory each pool gets, and carries that out."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, ParamSpec

from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.memory.budget import MemoryBudget, RowExtent
from kvstow.memory.nodememory import NodeMemory
from kvstow.owners import most_of
from kvstow.status import KeptMemory, MemoryWait
from kvstow_service.node.pools.memoryholder import MemoryHolder
from kvstow_service.node.pools.nodepool import NodePool
from kvstow_service.node.pools.noderecords import NodeRecords
from kvstow_service.node.pools.poolmemory import PoolMemory, PoolWorker, Post
from kvstow_service.node.survival.roster import PoolRecord, SurvivingPool, Survivors, WorkerRecord

logger = logging.getLogger("kvstow.node")

_ROUNDS = 1000
"""How often the budget may decide again at most before the thread handles other work."""
_LOOK_SECONDS = 1.0
"""The time between two checks whether processes still have memory that was given up, in seconds."""
_SLICE_PAUSE = 0.0005
"""Seconds between two slices of owed slots. Without a pause, this thread would take a pool's lock again before other
threads that wait for it."""
_RETRY_SECONDS = 0.02
"""The time after which a pool retries an action that had to wait, in seconds. No event says when it can succeed."""
_CHECK_SECONDS = 1.0
"""The time between two checks of the keeper, and of memory that was given up, in seconds."""

MOST_DEPARTED = 512
"""How many processes are watched at most after they have reported that they have no memory. Each takes a
descriptor."""

P = ParamSpec("P")


class MemoryFigures(NamedTuple):
    """The figures that the memory thread publishes.

    `waits` names the sessions that hold memory which pools should get. `kept` names the sessions that may still have
    memory which they have given back. Each entry comes with the time at which it began, on the monotonic clock.
    `notices` are sentences that say why else pools must wait for memory. `failures` are sentences that say why workers
    lack memory of their pools.
    """

    waits: tuple[tuple[MemoryWait, float], ...] = ()
    kept: tuple[tuple[KeptMemory, float], ...] = ()
    notices: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    allocated_bytes: int = 0
    spare_bytes: int = 0
    recalled_bytes: int = 0


def session_of(client: str) -> str:
    """Return the session of a worker, given its name: see `MemoryHolder.client`."""
    return client.rpartition("/")[0]


class MemoryThread:
    """Owns the node's memory. While the thread runs, no other code uses the budget or the `NodeMemory`.

    The thread may wait for the populator, for the keeper, and for the kernel to free memory. Other threads do not wait
    for it: they queue calls with `do`, such as calls of the methods below, which run in that order. Recovery calls the
    methods and `run_pending` directly before `start`, as do tests that have no thread. `figures` is replaced as a
    whole, so any thread may read it.
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
        """`post` makes the attach server's thread call something. It is used for `on_smaller`, whose argument is a pool
        that has lost slots. This thread calls `on_empty` for pools that have neither memory nor workers."""
        self.memory = memory
        self.figures = MemoryFigures()
        self.faults = 0
        """How many calls have failed because of a defect. The log has their tracebacks."""
        self.failure: str | None = None
        """A sentence that says why the thread has ended. None while it works."""
        self.records: NodeRecords | None = None
        """Records for the next service. Set before the first pool. None if memory ends with the service."""
        self._post, self._on_smaller, self._on_empty, self._on_failure = post, on_smaller, on_empty, on_failure
        self._pools: dict[str, PoolMemory] = {}
        self._departed: dict[str, Peer] = {}
        """Processes that have reported that they have no memory any more, by client, in the order of their reports.
        They are watched as long as the report may be false."""
        self._must_decide = True
        """Pools may want or have other amounts than when the budget last decided."""
        self._has_revoked_all = False
        self._look_at = 0.0
        self._since: dict[tuple[object, ...], float] = {}
        """When each entry of the figures began to wait or to be kept."""
        self._actions: deque[Callable[[], object]] = deque()
        self._owing: set[NodePool] = set()
        """Pools with slots to free that ended sessions and leases have held."""
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvstow-memory", daemon=True)
        memory.populator.add_listener(self._wake.set)

    @property
    def budget(self) -> MemoryBudget:
        return self.memory.budget

    def start(self) -> None:
        self._wake.set()  # so that the thread creates the extents
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent. The memory stays as it is."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        for peer in self._departed.values():
            peer.close()
        self._departed.clear()

    def close_records(self) -> None:
        """Close the records; the keeper still has them. Call this after the threads that use pools have ended.
        Idempotent."""
        for action in self._actions:
            last = action.args[-1] if isinstance(action, partial) and action.args else None
            if isinstance(last, Peer):
                last.close()
            elif isinstance(action, partial) and action.func == self._add_worker and last is not None:
                os.close(last)
        self._actions.clear()
        if self.records is not None:
            self.records.close([found.pool for found in self._pools.values()])

    # -- for any thread -------------------------------------------------------------------------------------

    def do(self, action: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have the thread make this call."""
        self._actions.append(partial(action, *args, **kwargs))
        self._wake.set()

    def add_worker(self, session: MemoryHolder, hello: Hello, peer: Peer) -> None:
        """From now on, give the worker the pool's memory. Raises `OSError` if this process can have no more
        descriptors."""
        record, pidfd = None, None
        if self.records is not None:
            record = session.worker_record(hello, peer)
            pidfd = None if peer.pidfd is None else os.dup(peer.pidfd)
        self.do(self._add_worker, session, hello.rank, record, pidfd)

    def free_owed(self, pool: NodePool) -> None:
        """Have the thread free slots that ended sessions and leases have held. That may take seconds, so the thread
        frees one slice at a time, and makes queued calls between the slices."""
        self._owing.add(pool)
        self._wake.set()

    def look_again(self) -> None:
        self._wake.set()

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait(self._patience())
                self._wake.clear()
                self.check()
                if not self._stopping:
                    self.run_pending()
        except BaseException as error:
            self.failure = f"the thread of the node's memory has failed: {error!r}"
            logger.critical("%s", self.failure, exc_info=error)
            with suppress(Exception):
                self._on_failure(self.failure)

    def _patience(self) -> float | None:
        if self._owing:
            return _SLICE_PAUSE
        if any(pool.waits for pool in self._pools.values()):  # no event says when a retry can succeed
            return _RETRY_SECONDS
        return _CHECK_SECONDS if self.records is not None or self.memory.waits else None

    def run_pending(self) -> None:
        """Make the queued calls, free a slice of each pool's owed slots, then let pools and workers follow the
        budget."""
        for _ in range(len(self._actions)):
            self._guarded(self._actions.popleft())
            self._must_decide = True
        for pool in self._owing.copy():  # other threads add pools meanwhile
            self._guarded(partial(self._free_slice, pool))
        self._follow_all()

    def _free_slice(self, pool: NodePool) -> None:
        self._owing.discard(pool)  # before the slice, because another thread may add the pool meanwhile
        if pool.debts.pay():
            self._owing.add(pool)

    def _guarded(self, action: Callable[[], object]) -> None:
        """Make a call. If a defect makes it fail, that is counted and logged, and the thread continues."""
        try:
            action()
        except Exception:
            self.faults += 1
            logger.exception("a change of the node's memory failed")

    # -- what an earlier service has left --------------------------------------------------------------------

    def restore_memory(self, survivors: Survivors) -> None:
        """Take over the memory of an earlier service. Its pools are restored next, before the budget decides."""
        for fd in survivors.given_up:
            self.memory.give_up(fd)
        self.memory.close_given_up()
        in_rows = {extent for pool in survivors.pools for row in pool.rows for extent in row.extents}
        for number, (extent, owner) in survivors.extents.items():
            if number not in in_rows:
                self.budget.restore_spare(number, extent.num_bytes, extent.numa_node, owner)
                self.memory.restore(number, extent)

    def restore_pool(self, pool: NodePool, found: SurvivingPool, survivors: Survivors) -> None:
        """Take over a pool's rows and journal. Each worker of an earlier session may have mapped all memory of its
        rank. Until engines have attached again, the pool asks for memory in the name of these sessions."""
        assert self.records is not None
        memory = self._enter_pool(pool, found.record)
        for row in found.rows:
            extents = [(extent, survivors.extents[extent][0]) for extent in row.extents]
            described = [RowExtent(extent, taken.num_bytes, taken.numa_node) for extent, taken in extents]
            self.budget.restore_row(pool.name, row.first_slot, row.num_slots, described)
            for extent, taken in extents:
                self.memory.restore(extent, taken)
        memory.restore()
        self.records.restore_pool(pool, found.record, found.journal)
        for record, pidfd in found.workers:
            self.records.add_worker(record, pidfd)
            place = pool.place_of(record.hello.rank)
            for row in found.rows:
                self.budget.record_mapping(record.client, row.extents[place])
            self.budget.attach(pool.name, record.session_id, record.wanted_slots)
            memory.claims.add(record.session_id)
            memory.want()

    # -- pools, sessions and workers -----------------------------------------------------------------------

    def add_pool(self, pool: NodePool, owner: int) -> None:
        record = pool.record(owner, self.budget.extent_bytes)
        self._enter_pool(pool, record)
        if self.records is not None:
            self.records.add_pool(pool, record)

    def _enter_pool(self, pool: NodePool, record: PoolRecord) -> PoolMemory:
        self.budget.add_pool(pool.name, record.layout)
        self.budget.pool(pool.name).wanted = 0  # until all workers of a session have attached
        on_smaller = partial(self._on_smaller, pool)
        found = self._pools[pool.name] = PoolMemory(pool, self.memory, self._post, on_smaller)
        return found

    def remove_pool(self, pool: NodePool) -> None:
        self.budget.remove_pool(pool.name)
        found = self._pools.pop(pool.name)
        self.memory.apply()
        found.dissolve()
        self.memory.apply()
        if self.records is not None:
            self.records.remove_pool(pool)

    def add_session(self, session: MemoryHolder) -> None:
        """Ask for the slots of the session. From now on, its pool has a session."""
        self.budget.attach(session.pool.name, session.session_id, session.wanted_slots)

    def _add_worker(self, session: MemoryHolder, rank: int, record: WorkerRecord | None, pidfd: int | None) -> None:
        if record is not None and self.records is not None:
            self.records.add_worker(record, pidfd)
        worker = PoolWorker(session, rank)
        self._pools[session.pool.name].workers[worker.client] = worker

    def end_client(self, client: str, left_alive: Peer | None = None) -> None:
        """Record that a worker has no memory any more. `left_alive` is its process if only the worker says so."""
        if left_alive is not None:
            self.budget.record_departure(client)
            self._departed[client] = left_alive
            self._forget_departed()
        elif client not in self._departed:  # `session_over` comes here too, although the process may live
            self.budget.record_death(client)
        if self.records is not None:
            self.records.remove_worker(client)

    def _forget_departed(self) -> None:
        """Forget processes that have ended, and those that have no former memory left. If a user has too many
        processes, some are forgotten as if they had ended: first those that are not known to keep memory, in the order
        of their reports."""
        relevant, by_uid = self.budget.clients(), Counter(peer.uid for peer in self._departed.values())
        keeping = {client for extent in self.budget.closed.values() for client in extent.had}
        for client, peer in sorted(self._departed.items(), key=lambda item: item[0] in keeping):
            too_many = by_uid[peer.uid] > most_of(MOST_DEPARTED, by_uid.total() - by_uid[peer.uid])
            if client not in relevant or peer.has_ended() or too_many:
                self.budget.record_death(client)
                self._departed.pop(client).close()
                by_uid[peer.uid] -= 1

    def kill_departed(self, session_id: str) -> None:
        """Kill the processes of a session that is over if they keep memory."""
        for client, peer in self._departed.items():
            if session_of(client) == session_id and not peer.kill() and not peer.has_ended():
                logger.warning(
                    "session %s: a process was not killed: the service sees no process of uid %d that it may kill",
                    session_id,
                    peer.uid,
                )

    def end_claims(self, pool: str) -> None:
        """Drop the claims of an earlier service's sessions to the pool's memory, because none of them comes back."""
        if (found := self._pools.get(pool)) is not None:
            while found.claims:
                self.budget.detach(pool, found.claims.pop())

    def start_session(self, pool: NodePool, nodes: list[int | None]) -> None:
        """All workers of a session have attached: ask for a row if the pool has none. `nodes` are the NUMA nodes of
        their devices."""
        self.budget.set_nodes(pool.name, nodes[: len(pool.stored_slot_bytes)])
        self.end_claims(pool.name)
        self._pools[pool.name].want()

    def revoke_all(self) -> None:
        """Ask all workers to release everything because the service ends, and grant nothing from now on."""
        self._has_revoked_all = True
        for found in self._pools.values():
            found.revoke_all()

    def lose_session(self, session: MemoryHolder) -> None:
        """Grant nothing more to the session's workers. They may still use what they have."""
        found = self._pools[session.pool.name]
        for rank in range(len(session.ranks)):
            found.workers.pop(session.client(rank), None)
        self.budget.detach(session.pool.name, session.session_id)

    def release(self, client: str, extents: Sequence[int]) -> None:
        """Record that a worker has released these extents. It may name one twice."""
        for extent in set(extents):
            self.budget.record_unmapping(client, extent)

    def grow(self, pool: NodePool) -> None:
        """Ask for more memory for a pool that uses more slots than its `grow_above`."""
        if pool.name in self._pools:
            self._pools[pool.name].want()

    # -- deciding, and following ---------------------------------------------------------------------------

    def check(self) -> None:
        if self.records is not None:
            self._guarded(partial(self.records.check, self.memory))
        if self.memory.waits and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            self._guarded(self._look_at_given_up)

    def _follow_all(self) -> None:
        """Let the budget decide if it must, record the result, and let pools and workers follow."""
        for _ in range(_ROUNDS):
            if self._must_decide:
                self._must_decide = False
                self._guarded(self.memory.apply)
                if self.records is not None:
                    self._guarded(partial(self.records.save, self.memory))
                self._guarded(self._settle)
            for pool in list(self._pools.values()):
                self._guarded(partial(self._follow, pool))
            if not self._must_decide:
                break
        self._show_figures()

    def _look_at_given_up(self) -> None:
        self._forget_departed()
        before = len(self.memory.given_up)
        self.memory.close_given_up()
        self._must_decide |= len(self.memory.given_up) < before  # `save` must remove what was closed
        self._settle()

    def _settle(self) -> None:
        self._must_decide |= self.memory.settle()

    def _follow(self, found: PoolMemory) -> None:
        if self._has_revoked_all:
            return
        self._must_decide |= found.follow()
        if found.is_empty:
            self._on_empty(found.pool)

    def _waits(self, due: Mapping[str, int]) -> Iterator[MemoryWait]:
        """Yield the sessions that use slots of recalled rows, or whose workers have not released these rows yet, for
        each pool that has less than its share. O(extents recalled, and their clients)."""
        if not self.budget.recalled_bytes:
            return
        held: Counter[str] = Counter()
        for found in self._pools.values():
            rows = self.budget.pool(found.pool.name).rows.values()
            recalled = [row for row in rows if row.recalled]
            for extent in (extent for row in recalled for extent in filter(None, row.extents)):
                clients = self.budget.mappers(extent)
                if found.holder in clients:  # the pool has not released the extent, because its slots are in use
                    sessions = found.users_from(min(row.first_slot for row in recalled))
                else:
                    sessions = {session_of(client) for client in clients}
                held.update(dict.fromkeys(sessions, self.budget.find(extent).num_bytes))
        for pool, share in due.items():
            if self.budget.pool(pool).held_bytes() < share:
                yield from (MemoryWait(pool, session, num_bytes) for session, num_bytes in held.items())

    def _kept(self) -> Mapping[tuple[str, ...], int]:
        """Return how many bytes were given back and may still be in use, by the sessions that had them. O(extents that
        were given back)."""
        by_sessions: Counter[tuple[str, ...]] = Counter()
        for extent in self.budget.closed.values():
            sessions = sorted({session_of(client) for client in extent.had})
            by_sessions[tuple(sessions)] += extent.num_bytes
        return by_sessions

    def _show_figures(self) -> None:
        notices = tuple(pool.notice for pool in self._pools.values() if pool.notice)
        failures = [pool.failure for pool in self._pools.values() if pool.failure]
        budget = self.budget
        due = budget.fair_shares()
        before, self._since, now = self._since, {}, time.monotonic()

        def since(*what: object) -> float:
            return self._since.setdefault(what, before.get(what, now))

        self.figures = MemoryFigures(
            tuple((wait, since(wait.pool, wait.session)) for wait in self._waits(due)),
            tuple((KeptMemory(sessions, taken), since(sessions)) for sessions, taken in self._kept().items()),
            notices,
            tuple(failures),
            budget.allocated_bytes,
            budget.spare_bytes,
            budget.recalled_bytes,
        )
        for name, found in self._pools.items():
            found.pool.granted_bytes = self.budget.pool(name).held_bytes()
            found.pool.due_bytes = due.get(name, 0)
