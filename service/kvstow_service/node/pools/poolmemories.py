"""The memory of all pools of the node: what each has, what it gets, and what the next service has to know about it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvstow.control.indexjournal import IndexJournal
from kvstow.memory.nodememory import NodeMemory
from kvstow_service.node.pools.nodepool import NodePool
from kvstow_service.node.pools.noderecords import NodeRecords
from kvstow_service.node.pools.nodesession import NodeSession
from kvstow_service.node.pools.poolmemory import PoolMemory, PoolWorker, Post
from kvstow_service.node.survival.keepermessages import Held
from kvstow_service.node.survival.poolrecord import PoolRecord
from kvstow_service.node.survival.survivingmemory import SurvivingMemory
from kvstow_service.node.survival.workerrecord import WorkerRecord

_ROUNDS = 1000

logger = logging.getLogger("kvstow.node")


class MemoryFigures(NamedTuple):
    """`notices` say why memory that pools should get or give back must wait. `failures` say why workers lack memory of
    their pools. Both are sentences."""

    notices: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    allocated_bytes: int = 0
    spare_bytes: int = 0
    recalled_bytes: int = 0


class PoolMemories:
    """Owns the budget and the `NodeMemory`. Not locked: the `MemoryThread` makes all calls, and recovery makes those
    before its start. `figures` are replaced as a whole, so any thread may read them."""

    def __init__(
        self,
        memory: NodeMemory,
        post: Post,
        on_smaller: Callable[[NodePool], object],
        on_empty: Callable[[NodePool], object],
    ) -> None:
        """See `MemoryThread`."""
        self.memory = memory
        self.figures = MemoryFigures()
        self.faults = 0
        """Calls that failed because of a defect. They are in the log."""
        self.must_decide = True
        """What pools want or have may have changed since the budget last decided."""
        self._budget = memory.budget
        self._post, self._on_smaller, self._on_empty = post, on_smaller, on_empty
        self._pools: dict[str, PoolMemory] = {}
        self._has_revoked_all = False
        self._records: NodeRecords | None = None
        self._keeper: SurvivingMemory | None = None
        self._claims: dict[str, set[str]] = {}
        """The sessions of an earlier service that may come back for their pool's memory, by pool."""

    @property
    def has_keeper(self) -> bool:
        return self._keeper is not None

    @property
    def waits(self) -> bool:
        """Whether a pool waits for something whose arrival nobody reports."""
        return any(pool.waits for pool in self._pools.values())

    def close_records(self) -> None:
        """Call after the threads that use pools have ended. Idempotent. The keeper still has the records."""
        if self._records is not None:
            self._records.close([found.pool for found in self._pools.values()])

    # -- an earlier life -----------------------------------------------------------------------------------

    def use_keeper(self, keeper: SurvivingMemory) -> None:
        """From now on, what the node has survives the service. The caller keeps the keeper."""
        self.memory.keeper = self._keeper = keeper
        most_bytes = max(self._budget.total_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        self._records = NodeRecords(keeper, most_bytes)

    def restore_pool(self, pool: NodePool, record: PoolRecord, journal: IndexJournal) -> None:
        """Takes ownership of the journal."""
        assert self._records is not None
        self._enter_pool(pool, record.owner, record.extent_bytes)
        self._records.restore_pool(pool, journal)

    def restore_extents(self, kept: Mapping[str, Held], pools: Iterable[str]) -> None:
        """Call after `restore_pool`, on pools that have had no extents. Takes ownership of the descriptors."""
        self.memory.restore(kept)
        for name in pools:
            self._pools[name].restore()

    def restore_worker(self, record: WorkerRecord, pidfd: int) -> None:
        """Restore a worker that may have mapped all memory of its rank. Until engines have attached again, it asks for
        memory in the name of its session. Call it after the extents are restored. Takes ownership of the pidfd."""
        assert self._records is not None
        self._records.restore_worker(record, pidfd)
        rows, place = self._budget.rows(record.pool), self._pools[record.pool].pool.place_of(record.rank)
        for number in range(self._budget.num_sound_rows(record.pool)):
            self._budget.record_mapping(record.client, rows[number].extents[place])
        self._budget.attach(record.pool, record.session_id, record.wanted_slots)
        self._claims.setdefault(record.pool, set()).add(record.session_id)
        self._pools[record.pool].want()

    # -- pools, sessions and workers -----------------------------------------------------------------------

    def add_pool(self, pool: NodePool, owner: int) -> None:
        self._enter_pool(pool, owner, self._budget.extent_bytes)
        if self._records is not None:
            self._records.add_pool(pool, owner, self._budget.extent_bytes)

    def _enter_pool(self, pool: NodePool, owner: int, extent_bytes: int) -> None:
        self._budget.add_pool(pool.name, pool.layout(owner, extent_bytes))
        self._budget.want(pool.name, 0)  # until all workers of an engine have attached
        on_smaller = partial(self._on_smaller, pool)
        self._pools[pool.name] = PoolMemory(pool, self.memory, self._post, on_smaller)

    def remove_pool(self, pool: NodePool) -> None:
        self._budget.remove_pool(pool.name)
        found = self._pools.pop(pool.name)
        self.memory.apply()
        found.dissolve()
        self.memory.apply()
        if self._records is not None:
            self._records.remove_pool(pool)

    def add_worker(self, session: NodeSession, rank: int, record: WorkerRecord | None, pidfd: int) -> None:
        if record is not None and self._records is not None:
            self._records.add_worker(record, pidfd)
        worker = PoolWorker(session, rank)
        self._pools[session.pool.name].workers[worker.client] = worker

    def end_client(self, client: str) -> None:
        self._budget.record_death(client)
        if self._records is not None:
            self._records.remove_worker(client)

    def end_claims(self, pool: str) -> None:
        for session_id in self._claims.pop(pool, ()):
            self._budget.detach(pool, session_id)

    def start_session(self, pool: NodePool, nodes: list[int | None]) -> None:
        self._budget.set_nodes(pool.name, nodes[: len(pool.stored_slot_bytes)])
        self.end_claims(pool.name)
        self._pools[pool.name].want()

    def revoke_all(self) -> None:
        self._has_revoked_all = True
        for found in self._pools.values():
            found.revoke_all()

    def lose_session(self, session: NodeSession) -> None:
        found = self._pools[session.pool.name]
        for client in session.clients():
            found.workers.pop(client, None)
        self._budget.detach(session.pool.name, session.session_id)

    def release(self, client: str, extents: Sequence[int]) -> None:
        for extent in extents:
            self._budget.record_unmapping(client, extent)

    def grow(self, pool: NodePool) -> None:
        if pool.name in self._pools:
            self._pools[pool.name].want()

    # -- deciding, and following ---------------------------------------------------------------------------

    def check_keeper(self) -> None:
        if self._keeper is not None:
            self.guarded(self._keeper.check)

    def follow(self) -> None:
        """Let the budget decide if it must, and let pools and workers follow."""
        for _ in range(_ROUNDS):
            if self.must_decide:
                self.must_decide = False
                self.guarded(self.memory.apply)
            for pool in list(self._pools.values()):
                self.guarded(partial(self._follow, pool))
            if not self.must_decide:
                break
        self._show_figures()

    def guarded(self, action: Callable[[], object]) -> None:
        """Run `action`. A defect is counted and logged, and the thread continues."""
        try:
            action()
        except Exception:
            self.faults += 1
            logger.exception("a change of the node's memory failed")

    def _follow(self, found: PoolMemory) -> None:
        if self._has_revoked_all:
            return
        if found.follow():
            self.must_decide = True
        if found.is_empty:
            self._on_empty(found.pool)

    def _show_figures(self) -> None:
        notices = tuple(pool.notice for pool in self._pools.values() if pool.notice)
        failures = [pool.failure for pool in self._pools.values() if pool.failure]
        if self._records is not None:
            failures += self._records.problems.values()
        if self._keeper is not None and self._keeper.notice is not None:
            failures.append(self._keeper.notice)
        budget = self._budget
        self.figures = MemoryFigures(
            notices, tuple(failures), budget.allocated_bytes, budget.spare_bytes, budget.recalled_bytes
        )
        due = self._budget.fair_shares()
        for name, found in self._pools.items():
            found.pool.granted_bytes = self._budget.granted_bytes(name)
            found.pool.due_bytes = due.get(name, 0)
