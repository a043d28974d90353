"""What the next service has to know, besides the extents: the index of each pool, and the workers that have memory."""

from __future__ import annotations

import logging
import os

from kvstow.control.indexjournal import IndexJournal
from kvstow.errors import JournalError, PinError
from kvstow.memory.nodememory import ExtentKeeper
from kvstow_service.node.pools.nodepool import NodePool
from kvstow_service.node.survival.poolrecord import PoolRecord
from kvstow_service.node.survival.workerrecord import WorkerRecord

JOURNAL_PREFIX, WORKER_PREFIX = "journal-", "worker-"  # of names at the keeper

logger = logging.getLogger("kvstow.node")


class NodeRecords:
    """Journals and pidfds: here, and at the keeper. Used by the memory thread.

    Two orders matter. A pool has its journal before it has slots. A worker is known to the keeper before it gets a
    descriptor.
    """

    def __init__(self, keeper: ExtentKeeper, most_bytes: int) -> None:
        """`most_bytes`: the most memory that a pool may ever have."""
        self.problems: dict[str, str] = {}
        """Why a pool's index would not survive, as a sentence, by pool."""
        self._keeper = keeper
        self._most_bytes = most_bytes
        self._journals: dict[str, IndexJournal] = {}
        self._pidfds: dict[str, int] = {}
        """By the worker's name in the books of memory."""

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

    def restore_pool(self, pool: NodePool, journal: IndexJournal) -> None:
        """Take ownership of the journal, which may be that of an earlier service. The keeper gets this descriptor, in
        place of the one that it may have, so that the next keeper gets it, too."""
        self._journals[pool.name] = journal
        pool.begin_journal(journal)
        self._keeper.put({f"{JOURNAL_PREFIX}{pool.name}": (journal.fd, "")})

    def remove_pool(self, pool: NodePool) -> None:
        """Remove a pool that can no longer be found and has no memory."""
        self.problems.pop(pool.name, None)
        journal = self._journals.pop(pool.name, None)
        if journal is not None:
            pool.end_journal()
            self._keeper.drop([f"{JOURNAL_PREFIX}{pool.name}"])
            journal.close()

    def add_worker(self, record: WorkerRecord, pidfd: int) -> None:
        """Takes ownership of the pidfd, or of the descriptor that stands for it."""
        self.restore_worker(record, pidfd)
        self._keeper.put({f"{WORKER_PREFIX}{record.client}": (pidfd, record.to_text())})

    def restore_worker(self, record: WorkerRecord, pidfd: int) -> None:
        """Restore a worker that the keeper has. Takes ownership of the pidfd."""
        self._pidfds[record.client] = pidfd

    def remove_worker(self, client: str) -> None:
        """The worker can no longer reach memory."""
        pidfd = self._pidfds.pop(client, None)
        if pidfd is not None:
            self._keeper.drop([f"{WORKER_PREFIX}{client}"])
            os.close(pidfd)

    def close(self, pools: list[NodePool]) -> None:
        """Close the records. The keeper still has everything. Idempotent."""
        for pool in pools:
            pool.end_journal()
        for journal in self._journals.values():
            journal.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._journals.clear()
        self._pidfds.clear()
