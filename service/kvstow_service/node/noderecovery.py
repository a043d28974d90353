"""Recovery of a node: a service takes over what the previous one has left with the keeper."""

from __future__ import annotations

import gc
import logging
import os
import time

from kvstow.control.sharedpool import EarlierSession, recover
from kvstow_service.node.attach.attachserver import AttachServer
from kvstow_service.node.nodehost import NodeHost
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import NodePool
from kvstow_service.node.survival.survivors import SurvivingPool, SurvivingWorker, Survivors

logger = logging.getLogger("kvstow.node")


def recover_node(survivors: Survivors, memory: MemoryThread, host: NodeHost, server: AttachServer) -> int:
    """Make a node of plain data, before any of its threads has started. Takes over the descriptors. Returns the number
    of blocks. 2 s for a million."""
    begun = time.monotonic()
    gc.disable()  # a million keys are made, and no cycle: looking for some took a quarter of the time
    try:
        num_blocks = _recover(survivors, memory, host, server)
    finally:
        gc.enable()
    if survivors.pools:
        seconds = time.monotonic() - begun
        logger.info("%d blocks in %d pools were recovered in %.2f s", num_blocks, len(survivors.pools), seconds)
    return num_blocks


def _recover(survivors: Survivors, memory: MemoryThread, host: NodeHost, server: AttachServer) -> int:
    memory.pools.restore_memory(survivors)
    num_blocks = 0
    for found in survivors.pools:
        pool = host.restore_pool(found.record, found.namespaces)
        memory.pools.restore_pool(pool, found, survivors)
        num_blocks += _recover_blocks(pool, found)
        for session_id, workers in _sessions(found).items():
            host.restore_session(workers[0].record)
            peers = [(one.hello(), one.peer(None if pidfd is None else os.dup(pidfd))) for one, pidfd in workers]
            server.restore_session(session_id, workers[0].record.token_digest, peers)
    return num_blocks


def _recover_blocks(pool: NodePool, found: SurvivingPool) -> int:
    earlier = [
        EarlierSession(workers[0].record.number, workers[0].record.engine, frozenset(one.client for one, _ in workers))
        for workers in _sessions(found).values()
    ]
    names = {tag: label.name for tag, label in found.journal.namespaces().items()}
    return recover(pool, found.journal.recover(), names, earlier)


def _sessions(found: SurvivingPool) -> dict[str, list[SurvivingWorker]]:
    """The workers of each session."""
    sessions: dict[str, list[SurvivingWorker]] = {}
    for worker in found.workers:
        sessions.setdefault(worker.record.session_id, []).append(worker)
    return sessions
