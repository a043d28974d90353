"""Adoption: a running service takes up a pool of the one before it, which its engines have handed back.

That is for services that were killed together with their keeper, as when a pod is replaced.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from kvstow.errors import KvstowError
from kvstow_service.node.attach.attachserver import AttachServer
from kvstow_service.node.nodehost import NodeHost
from kvstow_service.node.noderecovery import NodeRecovery
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import NodePool
from kvstow_service.node.survival.handover import Handover
from kvstow_service.node.survival.keepermessages import Held
from kvstow_service.node.survival.survivingmemory import SurvivingMemory

logger = logging.getLogger("kvstow.node")

_REASON = "its engine has memory of the service before, which this one takes up: attach again"


class Adoption:
    """Replaces a pool that has had no memory by the one of the service before.

    The engines' sessions end first, and engines of the pool's layout are refused until it is over; then they find their
    blocks as after a restart with a keeper. Begun on the attach server's thread, carried out on that of the memory,
    which may wait; the sessions of the service before are known to the attach server before an engine comes back.
    """

    def __init__(self, keeper: SurvivingMemory, memory: MemoryThread, host: NodeHost, server: AttachServer) -> None:
        self._keeper, self._memory, self._host, self._server = keeper, memory, host, server

    def begin(self, pool: NodePool, handover: Handover, session_ids: Sequence[str]) -> None:
        """On the attach server's thread. Takes over the handover."""
        for session_id in session_ids:
            self._server.end_session(session_id, _REASON)
        self._server.post(lambda: self._replace(pool, handover))

    def _replace(self, pool: NodePool, handover: Handover) -> None:
        """The sessions have ended, and nobody has had memory of the pool."""
        self._host.drop_if_unused(pool)
        self._memory.run(lambda: self._carry_out(pool, handover))

    def _carry_out(self, pool: NodePool, handover: Handover) -> None:
        """On the thread of the memory."""
        then: list[Callable[[], object]] = []
        num_extents, is_adopted = handover.num_extents, False
        try:
            kept = handover.take(pool.identity, self._memory.next_extent)
            is_adopted = self._adopt(kept, then)
        except (KvstowError, OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%d extents that engines have handed back are given up: %s", num_extents, error)
        finally:
            handover.close()

            def end() -> None:
                for restore in then:
                    restore()
                self._host.end_adoption(pool.identity, is_adopted=is_adopted)

            self._server.post(end)

    def _adopt(self, kept: dict[str, Held], then: list[Callable[[], object]]) -> bool:
        if self._host.find_pool(next(iter(kept)).partition("-")[2]) is not None:
            for held in kept.values():
                os.close(held.fd)
            logger.warning("a pool that engines have handed back has the name of another one: it is given up")
            return False
        return NodeRecovery(self._keeper, self._memory, self._host, self._server).adopt(kept, then.append)
