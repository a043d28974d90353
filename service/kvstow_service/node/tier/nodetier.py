"""The fleet tier of the node service: one for each namespace, over one connection to the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from threading import Lock

from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import NodePool
from kvstow_service.node.pools.nodesession import NodeSession
from kvstow_service.node.tier.openstore import OpenStore
from kvstow_service.tiers.tierhost import TierChoice, TierHost


class NodeTier:
    """Opens and closes the store, and lets engines and pools enter and leave it. It is the `TierClients` of its `host`.

    `enter`, `leave` and `drop_pool` are for the attach server's thread, and wait for nothing. `open` and `close` may
    wait.
    """

    def __init__(
        self,
        memory: MemoryThread,
        post: Callable[[Callable[[], object]], object],
        sessions: Callable[[], list[NodeSession]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post`: has the attach server's thread call something. `sessions`: all that are attached, on that thread."""
        self.host = TierHost(self, clock=clock)
        self._memory, self._post, self._clock = memory, post, clock
        self._sessions = sessions
        self._lock = Lock()
        """Of what `enter` finds and makes, which other threads remove."""
        self._open: OpenStore | None = None
        self.closing_pools: set[str] = set()
        """Names of pools that were deleted, and whose memory the transfers may still have."""

    # -- the store ------------------------------------------------------------------------------------------

    def begin(self, choice: TierChoice) -> None:
        """The node has a store from its start on."""
        self.host.begin(choice)
        self.open(choice)

    def open(self, choice: TierChoice) -> None:
        opened = OpenStore(choice, self.host, self._memory, self._post, self._clock)
        with self._lock:
            self._open = opened
        self._post(self._enter_all)

    def close(self) -> None:
        with self._lock:
            opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def _enter_all(self) -> None:
        for session in self._sessions():
            self.enter(session)

    # -- engines: the attach server's thread ----------------------------------------------------------------

    def enter(self, session: NodeSession) -> None:
        """An engine is in its namespace from now on."""
        with self._lock:
            if self._open is not None:
                self._open.enter(session)

    def leave(self, session: NodeSession) -> None:
        """Take the session off the tier, because its keys no longer mean the same blocks."""
        session.control.on_stored = None
        session.tier = None

    def follow_pool(self, pool: NodePool) -> None:
        """The pool has become smaller."""
        with self._lock:
            found = None if self._open is None else self._open.pools.get(pool.name)
        if found is not None:
            found.member.follow_pool()

    def drop_pool(self, pool: NodePool, then: Callable[[], object]) -> None:
        """The pool is deleted: let go of its memory, and call `then`, from any thread."""
        with self._lock:
            opened = self._open
            found = None if opened is None else opened.pools.pop(pool.name, None)
            if opened is not None and found is not None:
                self.closing_pools.add(pool.name)
                opened.end_pool(found, partial(self._dropped, pool, then))  # a `close` that comes now waits for it
                return
        then()

    def _dropped(self, pool: NodePool, then: Callable[[], object]) -> None:
        try:
            then()
        finally:
            with self._lock:
                self.closing_pools.discard(pool.name)
