"""What the next service has to know, besides the extents: the index of each pool, and the workers that have memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

from kvstow.control.indexjournal import IndexJournal
from kvstow.errors import JournalError, PinError
from kvstow.memory.nodememory import ExtentKeeper
from kvstow_service.node.pools.nodepool import NodePool
from kvstow_service.node.survival.handover import JOURNAL, JOURNAL_PREFIX, SERVICE, WORKER_PREFIX
from kvstow_service.node.survival.poolrecord import PoolRecord
from kvstow_service.node.survival.workerrecord import WorkerRecord

MAX_PEERS = 200
"""How many workers of a pool each of its workers holds pidfds of."""

logger = logging.getLogger("kvstow.node")


class _Worker(NamedTuple):
    record: WorkerRecord
    pidfd: int


class NodeRecords:
    """Journals and pidfds: here, at the keeper, and with the workers of each pool. Used by the memory thread.

    Two orders matter. A pool has its journal before it has slots. A worker is known to the keeper and to the journal
    before it gets a descriptor.
    """

    def __init__(self, keeper: ExtentKeeper, most_bytes: int) -> None:
        """`most_bytes`: the most memory that a pool may ever have."""
        self.problems: dict[str, str] = {}
        """Why a pool's index would not survive, as a sentence, by pool."""
        self._keeper = keeper
        self._most_bytes = most_bytes
        self._journals: dict[str, IndexJournal] = {}
        self._workers: dict[str, _Worker] = {}
        self._extents: dict[str, Sequence[str]] = {}
        self._pools: dict[str, NodePool] = {}
        self._service = os.pidfd_open(os.getpid())

    def add_pool(self, pool: NodePool, owner: int, extent_bytes: int) -> None:
        """Begin the pool's journal. If there is no memory for it, the pool has none."""
        record = PoolRecord(pool.name, pool.model, owner, pool.identity, extent_bytes)
        most_slots = max(1, self._most_bytes // sum(pool.stored_slot_bytes))
        try:
            journal = IndexJournal.create(most_slots, {"pool": record.to_json()})
        except (PinError, JournalError) as error:
            self.problems[pool.name] = f"the index of pool {pool.name} would not survive the service: {error}"
            logger.warning("%s", self.problems[pool.name])
            return
        self.restore_pool(pool, journal)
        self.keep_journal(pool)

    def restore_pool(self, pool: NodePool, journal: IndexJournal) -> None:
        """Take ownership of an earlier service's journal. `keep_journal` follows once the pool is recovered."""
        self._journals[pool.name], self._pools[pool.name] = journal, pool
        pool.begin_journal(journal)

    def keep_journal(self, pool: NodePool) -> None:
        """Give the keeper the pool's journal, in place of the journal that it may have. From now on, workers may get
        it, too."""
        journal = self._journals[pool.name]
        try:
            journal.protect()
        except PinError as error:
            logger.warning("pool %s would not survive a pod that is replaced: %s", pool.name, error)
        self._keeper.put({f"{JOURNAL_PREFIX}{pool.name}": (journal.fd, "")})
        self._write_roster(pool.name)

    def remove_pool(self, pool: NodePool) -> None:
        """Remove a pool that can no longer be found and has no memory."""
        self.problems.pop(pool.name, None)
        self._extents.pop(pool.name, None)
        self._pools.pop(pool.name, None)
        journal = self._journals.pop(pool.name, None)
        if journal is not None:
            pool.end_journal()
            self._keeper.drop([f"{JOURNAL_PREFIX}{pool.name}"])
            journal.close()

    def set_extents(self, pool: str, extents: Sequence[str]) -> None:
        """What the next service has to know about the extents in the pool's rows. Call it before a worker gets them."""
        if self._extents.get(pool, []) != extents:
            self._extents[pool] = extents
            self._write_roster(pool)

    def add_worker(self, record: WorkerRecord, pidfd: int) -> None:
        """Takes ownership of the pidfd, or of the descriptor that stands for it."""
        self.restore_worker(record, pidfd)
        self._keeper.put({f"{WORKER_PREFIX}{record.client}": (pidfd, record.to_text())})
        self._write_roster(record.pool)

    def restore_worker(self, record: WorkerRecord, pidfd: int) -> None:
        """Restore a worker that the keeper has. Takes ownership of the pidfd."""
        self._workers[record.client] = _Worker(record, pidfd)

    def keep_workers(self, records: Sequence[WorkerRecord]) -> None:
        """Give the keeper these workers, which were restored from elsewhere."""
        workers = {record.client: self._workers[record.client] for record in records if record.client in self._workers}
        self._keeper.put(
            {f"{WORKER_PREFIX}{client}": (one.pidfd, one.record.to_text()) for client, one in workers.items()}
        )

    def remove_worker(self, client: str) -> str | None:
        """The worker can no longer reach memory. Returns its pool, or None if the worker is unknown."""
        worker = self._workers.pop(client, None)
        if worker is not None:
            self._keeper.drop([f"{WORKER_PREFIX}{client}"])
            os.close(worker.pidfd)
            self._write_roster(worker.record.pool)
        return None if worker is None else worker.record.pool

    def deposits(self, pool: str, client: str) -> dict[str, int]:
        """What a worker of the pool holds for the next service, by name. Empty if the index would not survive. This
        object keeps the descriptors."""
        journal = self._journals.get(pool)
        if journal is None or not journal.is_protected or pool in self.problems:
            return {}
        others = [one for one in self._workers.values() if one.record.pool == pool and one.record.client != client]
        pidfds = {f"{WORKER_PREFIX}{one.record.client}": one.pidfd for one in others if one.record.has_pidfd}
        return {JOURNAL: journal.fd, SERVICE: self._service, **dict(list(pidfds.items())[-MAX_PEERS:])}

    def _write_roster(self, name: str) -> None:
        """Record which extents and workers the journal's blocks depend on. A worker's first extent comes with a roster
        that names the worker."""
        if name not in self._journals:
            return
        workers = [one.record.to_text() for one in self._workers.values() if one.record.pool == name]
        try:
            self._pools[name].write_roster({"extents": self._extents.get(name, ()), "workers": workers})
        except JournalError as error:
            logger.warning("pool %s would not survive a pod that is replaced: %s", name, error)

    def close(self, pools: list[NodePool]) -> None:
        """Close the records. The keeper still has everything. Idempotent."""
        for pool in pools:
            pool.end_journal()
        for journal in self._journals.values():
            journal.close()
        for worker in self._workers.values():
            os.close(worker.pidfd)
        self._journals.clear()
        self._workers.clear()
        if self._service >= 0:
            os.close(self._service)
            self._service = -1
