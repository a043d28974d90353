"""The memory thread: it decides how much of the node's memory each pool gets, and carries that out."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.bytesize import format_size
from kvstow.errors import AttachRefusedError
from kvstow.memory.nodememory import NodeMemory
from kvstow.memory.rows import PoolLayout
from kvstow_service.node.pools.nodepool import NodePool
from kvstow_service.node.pools.nodesession import NodeSession
from kvstow_service.node.pools.poolmemories import MemoryFigures, PoolMemories
from kvstow_service.node.pools.poolmemory import Post

_RETRY_SECONDS = 0.02
_CHECK_SECONDS = 1.0  # between two checks of the keeper, and of memory that was given up

logger = logging.getLogger("kvstow.node")


class MemoryThread:
    """Makes all calls of `PoolMemories`. While it runs, nothing else uses `PoolMemories`, the budget or the
    `NodeMemory`.

    It may wait for the populator, for the keeper, and for the kernel to free memory. No other thread waits for it. All
    methods may be called from any thread and only queue an action; actions run in the order of the calls. `run_pending`
    is for the thread itself, and for tests without the thread.
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
        """`post` has the attach server's thread call something. That is how `on_smaller` is called with a pool that has
        lost slots. `on_empty` is called on this thread while a pool has neither memory nor workers."""
        self.memory = memory
        self.pools = PoolMemories(memory, post, on_smaller, on_empty)
        """For this thread, and for recovery before the start."""
        self.failure: str | None = None
        """Why the thread has ended; None if it has not."""
        self._budget = memory.budget
        self._on_failure = on_failure
        self._actions: deque[Callable[[], object]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvstow-memory", daemon=True)
        memory.populator.add_listener(self._wake.set)

    def start(self) -> None:
        self._wake.set()  # to create the extents
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent. The memory stays as it is."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def close_records(self) -> None:
        """Call after the threads that use pools have ended. Idempotent. The keeper still has the records."""
        for action in self._actions:
            if isinstance(action, partial) and action.func == self.pools.add_worker and action.args[-1] is not None:
                os.close(action.args[-1])
        self._actions.clear()
        self.pools.close_records()

    # -- for any thread -------------------------------------------------------------------------------------

    @property
    def figures(self) -> MemoryFigures:
        return self.pools.figures

    @property
    def faults(self) -> int:
        """Changes that failed because of a defect. They are in the log."""
        return self.pools.faults

    @property
    def extent_bytes(self) -> int:
        return self._budget.extent_bytes

    @property
    def total_bytes(self) -> int:
        """The node's budget."""
        return self._budget.total_bytes

    def require_room(self, layout: PoolLayout) -> None:
        """Raises `AttachRefusedError` if the node has no room for a single slot of such a pool."""
        if layout.bytes_of(1) > self.total_bytes:
            raise AttachRefusedError(
                "memory",
                f"one slot on all ranks takes {format_size(layout.bytes_of(1))}, and the node service has "
                f"{format_size(self.total_bytes)}: give it more with --memory",
            )

    def add_pool(self, pool: NodePool, owner: int) -> None:
        self._do(partial(self.pools.add_pool, pool, owner))

    def remove_pool(self, pool: NodePool) -> None:
        """Remove a pool that has no sessions and can no longer be found."""
        self._do(partial(self.pools.remove_pool, pool))

    def add_worker(self, session: NodeSession, hello: Hello, peer: Peer) -> None:
        """Give the worker the pool's memory from now on. Raises `OSError` if this process can have no more
        descriptors."""
        record, pidfd = None, None
        if self.pools.records is not None:
            record = session.worker_record(hello, peer)
            pidfd = None if peer.pidfd is None else os.dup(peer.pidfd)
        self._do(partial(self.pools.add_worker, session, hello.rank, record, pidfd))

    def add_session(self, session: NodeSession, slots: int | None) -> None:
        """The session asks for so many slots, or for all. From now on its pool counts as one with sessions."""
        self._do(partial(self._budget.attach, session.pool.name, session.session_id, slots))

    def start_session(self, session: NodeSession) -> None:
        """All workers of the session have attached: its pool gets a row if it has none."""
        self._do(partial(self.pools.start_session, session.pool, session.numa_nodes()))

    def lose_session(self, session: NodeSession) -> None:
        """Give the session's workers nothing more. They may still use what they have."""
        self._do(partial(self.pools.lose_session, session))

    def release(self, client: str, extents: Sequence[int]) -> None:
        """The worker has let go of these extents."""
        self._do(partial(self.pools.release, client, tuple(extents)))

    def end_client(self, client: str) -> None:
        """The worker can no longer reach memory."""
        self._do(partial(self.pools.end_client, client))

    def end_claims(self, pool: NodePool) -> None:
        """The pool no longer has sessions."""
        self._do(partial(self.pools.end_claims, pool.name))

    def grow(self, pool: NodePool) -> None:
        """The pool uses more than `grow_above`."""
        self._do(partial(self.pools.grow, pool))

    def revoke_all(self, then: Callable[[], object]) -> None:
        """The service ends: ask all workers to let go of everything, give them nothing from now on, and call `then`."""
        self._do(self.pools.revoke_all)
        self._do(then)

    def look_again(self) -> None:
        """Something that memory may have been waiting for has changed."""
        self._wake.set()

    def retry(self) -> None:
        """Try again to get memory that was refused."""
        self._do(self.memory.retry)

    def check_integrity(self) -> None:
        """Compare the books of the memory. A contradiction counts as a fault."""
        self._do(self._budget.check_integrity)

    def _do(self, action: Callable[[], object]) -> None:
        self._actions.append(action)
        self._wake.set()

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait(self._patience())
                self._wake.clear()
                self.pools.check()
                if not self._stopping:
                    self.run_pending()
        except BaseException as error:
            self.failure = f"the thread of the node's memory has failed: {error!r}"
            logger.critical("%s", self.failure, exc_info=error)
            with suppress(Exception):
                self._on_failure(self.failure)

    def _patience(self) -> float | None:
        if self.pools.waits:
            return _RETRY_SECONDS
        return _CHECK_SECONDS if self.pools.records is not None or self.memory.waits else None

    def run_pending(self) -> None:
        """Run the queued actions, then let pools and workers follow."""
        for _ in range(len(self._actions)):
            self.pools.guarded(self._actions.popleft())
            self.pools.must_decide = True
        self.pools.follow()
