"""Adoption: a running service takes over a pool of the previous service that the pool's engines have handed back.

This happens when the service and its keeper were killed together, as when a pod is replaced.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from kvstow_service.node.attach.attachserver import AttachServer
from kvstow_service.node.nodehost import NodeHost
from kvstow_service.node.noderecovery import NodeRecovery
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import NodePool
from kvstow_service.node.survival.handover import JOURNAL_PREFIX, Handover
from kvstow_service.node.survival.keepermessages import Held
from kvstow_service.node.survival.survivingmemory import SurvivingMemory

logger = logging.getLogger("kvstow.node")

_REASON = "the service takes over the memory that this engine has handed back: attach again"


class Adoption:
    """Replaces a new pool, which has no memory yet, with the pool of the previous service.

    The sessions of the new pool end first, and engines of its layout are refused until the adoption has ended. Then
    they attach again and find their blocks, as after a restart with a keeper. An adoption begins on the attach server's
    thread. The memory thread, which may wait, carries it out. The attach server gets the sessions of the previous
    service before any engine can attach again.
    """

    def __init__(
        self,
        keeper: SurvivingMemory,
        memory: MemoryThread,
        host: NodeHost,
        server: AttachServer,
        on_failure: Callable[[str], object],
    ) -> None:
        """`on_failure` is called if the service must end because a pool was taken over only in part: slots that the
        previous service's processes still use may count as free. The pool's engines stay refused."""
        self._keeper, self._memory, self._host, self._server = keeper, memory, host, server
        self._on_failure = on_failure

    def begin(self, pool: NodePool, handover: Handover, session_ids: Sequence[str]) -> None:
        """Called on the attach server's thread. Owns the handover from now on."""
        for session_id in session_ids:
            self._server.end_session(session_id, _REASON)
        self._server.post(lambda: self._replace(pool, handover))

    def _replace(self, pool: NodePool, handover: Handover) -> None:
        """Called on the attach server's thread. The sessions have ended, and none of them had memory."""
        self._host.drop_if_unused(pool)
        self._memory.run(lambda: self._carry_out(pool, handover))

    def _carry_out(self, pool: NodePool, handover: Handover) -> None:
        """Called on the memory thread."""
        then: list[Callable[[], object]] = []
        recovery = NodeRecovery(self._keeper, self._memory, self._host, self._server)
        num_extents, is_adopted = handover.num_extents, False
        try:
            kept = handover.take(pool.identity, self._memory.pools.next_extent)
            is_adopted = self._adopt(recovery, kept, then)
        except Exception as error:
            if recovery.has_begun:
                self._on_failure(f"a pool that engines have handed back was taken over in part only: {error!r}")
                raise
            logger.warning("%d extents that engines have handed back are given up: %s", num_extents, error)
        finally:
            handover.close()

        def end() -> None:
            for restore in then:
                restore()
            self._host.handovers.end_adoption(pool.identity, is_adopted=is_adopted)

        self._server.post(end)

    def _adopt(self, recovery: NodeRecovery, kept: dict[str, Held], then: list[Callable[[], object]]) -> bool:
        (name,) = (key.removeprefix(JOURNAL_PREFIX) for key in kept if key.startswith(JOURNAL_PREFIX))
        if self._host.find_pool(name) is not None:
            for held in kept.values():
                os.close(held.fd)
            logger.warning("pool %s, which engines have handed back, is given up: another pool has its name", name)
            return False
        return recovery.adopt(kept, then.append)
