"""The growth of a pool: chunks are populated ahead, and registered by the thread of the host or of the pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from kvstow.errors import PinError
from kvstow.memory.chunks import Chunk, ChunkMemory, PinnedChunks
from kvstow.memory.hoststeps import CallQueue, HostSteps, RegisterCall
from kvstow.memory.pinning import Registrar

logger = logging.getLogger("kvstow.pool")

_REFILL_DIVISOR = 3
"""More chunks are populated once only a third of those ahead is left to register. Beside steps of 20 ms, the register
calls of that third last 160 ms."""


class Growth:
    """The chunks that are being added to a pool. Each one is planned, populated and registered, in slot order.

    The pinning thread uses this object, and calls `end` last. It populates chunks itself. While the host is idle,
    another thread populates them. Their register calls wait in `queue`, where the host's thread may make them. Any
    thread may hold or stop the queue.
    """

    def __init__(
        self,
        pinned: PinnedChunks | None,
        plan: Callable[[int, int], list[Chunk]],
        memory: ChunkMemory,
        registrar: Registrar,
        steps: HostSteps,
        chunks_ahead: int,
    ) -> None:
        """`pinned` are the chunks that the pool has before it grows. `plan(covered, number)` returns at most `number`
        chunks that follow the first `covered` slots. At most `chunks_ahead` chunks are populated and not registered."""
        self.queue = CallQueue()
        self.end_slot = 0
        """The end slot of the last planned chunk. `plan` sets it."""
        self._before = pinned
        self._plan = plan
        self._memory = memory
        self._registrar = registrar
        self._steps = steps
        self._chunks_ahead = chunks_ahead
        self._after_call: list[PinnedChunks] = []
        """Entry `i` holds the chunks that are pinned once call `i` of the queue has been made."""
        self._ahead: Future[list[Chunk]] | None = None
        """The result of the other thread: chunks that it populates, until this thread takes them."""
        self._thread: ThreadPoolExecutor | None = None
        self._has_no_thread = False

    @property
    def pinned(self) -> PinnedChunks | None:
        """The chunks that are registered by now, including those from before the growth."""
        made = self.queue.made
        return self._after_call[made - 1] if made else self._before

    @property
    def is_registered(self) -> bool:
        """Whether every planned chunk is registered."""
        return self.queue.made == len(self._after_call) and self._ahead is None

    def populate_ahead(self) -> int | None:
        """Populate more chunks if few populated ones are left to register. This thread does it, or another one while
        the host is idle, so that this thread can go on to register.

        Returns the number of made calls at which to call this again, or None if there is nothing to register. Raises
        `PinError` if the next chunk cannot be populated.
        """
        most = self._chunks_ahead
        refill_at = most // _REFILL_DIVISOR
        while True:
            self._add(self._take_ahead(wait=self.queue.made == len(self._after_call)))
            pending = len(self._after_call) - self.queue.made
            is_idle = self._steps.is_idle()
            if pending > (most - refill_at if is_idle else refill_at):
                return len(self._after_call) - refill_at
            if self._ahead is not None:
                return len(self._after_call)
            chunks = self._next_chunks(most - pending)
            if chunks and is_idle and pending and self._begin_ahead(chunks):
                return len(self._after_call)
            if not chunks or not (chunks := self._commit(chunks, is_idle, is_optional=pending > 0)):
                return len(self._after_call) if pending else None
            self._add(chunks)
            if not is_idle:
                return len(self._after_call) - refill_at

    def end(self) -> None:
        """Give back the chunks that are populated but not registered. Call it after `CallQueue.settle`."""
        rest = [chunks.last for chunks in self._after_call[self.queue.made :]]
        try:
            rest += self._take_ahead(wait=True)
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            for chunk in reversed(rest):  # one at a time, because they may lie in different extents
                self._memory.decommit(chunk)

    def _begin_ahead(self, chunks: Sequence[Chunk]) -> bool:
        """Populate the chunks on another thread. Returns False if the process cannot start a thread."""
        thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="kvstow-ahead")
        try:
            if not self._has_no_thread:
                self._ahead = thread.submit(self._commit, chunks, True, is_optional=True)
                self._thread = thread
        except RuntimeError as error:
            self._has_no_thread = True
            logger.warning("memory is not populated ahead, so pinning takes longer: %s", error)
        return not self._has_no_thread

    def _take_ahead(self, *, wait: bool) -> list[Chunk]:
        """Return the chunks that the other thread has populated since the last call. The list is empty if the thread
        has not finished yet; with `wait`, wait for it."""
        ahead = self._ahead
        if ahead is None or not (wait or ahead.done()):
            return []
        self._ahead = None
        return ahead.result()

    def _next_chunks(self, most: int) -> list[Chunk]:
        top = self._after_call[-1] if self._after_call else self._before
        # The first batches are small, so that some slots can be used soon.
        return self._plan(top.last.end_slot if top else 0, min(max(1, len(self._after_call)), most))

    def _add(self, chunks: Sequence[Chunk]) -> None:
        """Put the register calls of these populated chunks into the queue."""
        if not chunks:
            return
        top, more = self._after_call[-1] if self._after_call else self._before, []
        try:
            for chunk in chunks:
                top = PinnedChunks.on(top, chunk, self._memory.bytes_by_node(chunk))
                more.append(top)
            self._after_call.extend(more)
        except BaseException:
            self._memory.decommit(_span(chunks))
            raise
        self.queue.add([RegisterCall(partial(self._register, chunk), chunk.num_bytes) for chunk in chunks])

    def _register(self, chunk: Chunk) -> None:
        """Pin a committed chunk, on the pinning thread or the host's. If it raises `PinError`, nothing is pinned."""
        self._registrar.register(self._memory.address_of(chunk), chunk.num_bytes)

    def _commit(self, chunks: Sequence[Chunk], host_is_idle: bool, *, is_optional: bool) -> list[Chunk]:
        """Commit all chunks, or only the first one if there is no memory for all. Returns the committed chunks.

        Raises `PinError` if there is no memory even for one. With `is_optional`, it returns an empty list instead: the
        pool can still register other chunks, and the next attempt raises.
        """
        for batch in (chunks, chunks[:1]):
            try:
                self._memory.commit(_span(batch), host_is_idle=host_is_idle)
            except PinError:
                if len(batch) == 1 and not is_optional:
                    raise
            else:
                return list(batch)
        return []


def _span(chunks: Sequence[Chunk]) -> Chunk:
    """Join chunks that follow each other in memory into one."""
    first, last = chunks[0], chunks[-1]
    return replace(first, end_slot=last.end_slot, num_bytes=last.end_offset - first.offset)
