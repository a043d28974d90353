"""Recovery of a node: a service takes over what the previous one has left with the keeper."""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable
from typing import NamedTuple

from kvstow.attach.identity import NamespaceIdentity
from kvstow.attach.jsonobject import JsonObject
from kvstow.control.indexjournal import IndexJournal
from kvstow.control.recovery import EarlierSession, recover
from kvstow.control.slotjournal import NamespaceLabel
from kvstow.errors import KvstowError, NotFoundError
from kvstow.memory.nodememory import NAME_PREFIX as EXTENT_PREFIX
from kvstow_service.node.attach.attachserver import AttachServer
from kvstow_service.node.nodehost import NodeHost
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool
from kvstow_service.node.pools.noderecords import JOURNAL_PREFIX, WORKER_PREFIX
from kvstow_service.node.survival.keepermessages import Held
from kvstow_service.node.survival.poolrecord import PoolRecord
from kvstow_service.node.survival.survivingmemory import SurvivingMemory
from kvstow_service.node.survival.workerrecord import WorkerRecord

logger = logging.getLogger("kvstow.node")


class _Worker(NamedTuple):
    """A worker that may still use the memory."""

    record: WorkerRecord
    pidfd: int | None


class NodeRecovery:
    """Used once, before any thread of the node has started."""

    def __init__(self, keeper: SurvivingMemory, memory: MemoryThread, host: NodeHost, server: AttachServer) -> None:
        self._keeper, self._memory, self._host, self._server = keeper, memory, host, server
        self._pools: dict[str, tuple[NodePool, IndexJournal]] = {}
        self._workers: list[_Worker] = []

    def run(self) -> int:
        """Recover from the keeper. Returns the number of blocks. What cannot be used is dropped, with a line in the
        log. 2 s for a million blocks. Raises `KeeperError`."""
        begun = time.monotonic()
        kept = self._keeper.take_all()
        self._take(kept, JOURNAL_PREFIX, self._take_journal)
        extents = {name: held for name, held in kept.items() if name.startswith(EXTENT_PREFIX)}
        self._memory.pools.restore_extents(extents, self._pools)
        self._take(kept, WORKER_PREFIX, self._take_worker)
        self._drop({name: held for name, held in kept.items() if not name.startswith(_KNOWN)}, "its kind is unknown")
        self._memory.run_pending()
        num_blocks = sum(self._recover_pool(*found) for found in self._pools.values())
        self._restore_sessions()
        if self._pools:
            seconds = time.monotonic() - begun
            logger.info("%d blocks in %d pools were recovered in %.2f s", num_blocks, len(self._pools), seconds)
        return num_blocks

    def _take(self, kept: dict[str, Held], prefix: str, take: Callable[[Held], None]) -> None:
        for name, held in kept.items():
            if name.startswith(prefix):
                try:
                    take(held)
                except (KvstowError, OSError, ValueError, KeyError, TypeError) as error:
                    self._drop({name: held}, str(error))

    def _drop(self, kept: dict[str, Held], why: str) -> None:
        for name, held in kept.items():
            logger.warning("%s of an earlier service is not used: %s", name, why)
            self._keeper.drop([name])
            os.close(held.fd)

    def _take_journal(self, held: Held) -> None:
        fd = os.dup(held.fd)
        try:
            journal = IndexJournal.open(fd)
        except BaseException:
            os.close(fd)
            raise
        try:
            record = PoolRecord.from_json(journal.content["pool"])
            known = {label.name: known for label in journal.namespaces().values() if (known := _known(label))}
        except BaseException:
            journal.close()
            raise
        pool = self._host.restore_pool(record, known)
        self._memory.pools.restore_pool(pool, record, journal)
        self._pools[pool.name] = (pool, journal)
        os.close(held.fd)

    def _take_worker(self, held: Held) -> None:
        record = WorkerRecord.from_text(held.info)
        if record.pool not in self._pools:
            raise NotFoundError(f"there is no pool {record.pool}")
        worker = _Worker(record, held.fd if record.has_pidfd else None)
        self._memory.pools.restore_worker(record, held.fd)
        if worker.pidfd is not None and select.select([worker.pidfd], [], [], 0)[0]:
            self._memory.end_client(record.client)  # it has ended meanwhile
        else:
            self._workers.append(worker)

    def _recover_pool(self, pool: NodePool, journal: IndexJournal) -> int:
        earlier: dict[int, set[str]] = {}
        names: dict[int, str] = {}
        for record, _ in self._workers:
            if record.pool == pool.name:
                earlier.setdefault(record.number, set()).add(record.client)
                names[record.number] = record.engine
        return recover(
            pool,
            journal.recover(),
            {tag: label.name for tag, label in journal.namespaces().items()},
            [EarlierSession(number, names[number], frozenset(clients)) for number, clients in earlier.items()],
        )

    def _restore_sessions(self) -> None:
        sessions: dict[str, list[_Worker]] = {}
        for worker in self._workers:
            sessions.setdefault(worker.record.session_id, []).append(worker)
        for session_id, workers in sessions.items():
            record = workers[0].record
            self._host.restore_session(record)
            peers = [(one.hello(), one.peer(None if pidfd is None else os.dup(pidfd))) for one, pidfd in workers]
            self._server.restore_session(session_id, record.token_digest, peers)


_KNOWN = (EXTENT_PREFIX, JOURNAL_PREFIX, WORKER_PREFIX)


def _known(label: NamespaceLabel) -> KnownNamespace | None:
    if label.note is None:
        return None
    return KnownNamespace(label.name, NamespaceIdentity.from_json(JsonObject(label.note, "record of a namespace")), ())
