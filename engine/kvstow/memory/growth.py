"""The growth of a pool: which chunks are populated, and which of these are registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvstow.errors import PinError
from kvstow.memory.callqueue import Call, CallQueue
from kvstow.memory.chunks import Chunk, PinnedChunks
from kvstow.memory.pace import Pace
from kvstow.memory.pacedregistrar import PacedRegistrar
from kvstow.memory.poolmemory import PoolMemory
from kvstow.memory.populating import Populating

_REFILL = 3  # more chunks are populated when a third of those ahead are left: 160 ms of calls beside steps of 20 ms


class Growth:
    """Chunks on their way into a pool. They are planned, populated, and registered, in the order of their slots.

    The pinning thread uses it, and calls `end` last. It populates chunks here or, beside an idle host, on another
    thread. Their register calls wait in `queue`, from which the host's thread takes some; any thread may hold or stop
    the queue.
    """

    def __init__(
        self,
        pinned: PinnedChunks | None,
        plan: Callable[[int, int], list[Chunk]],
        *,
        memory: PoolMemory,
        paced: PacedRegistrar,
        pace: Pace,
        is_host_idle: Callable[[], bool],
    ) -> None:
        """`pinned`: what the pool has already. `plan(covered, number)` names up to `number` chunks to populate after
        the first `covered` slots, which follow each other in memory; none if there is no more to do for now."""
        self.queue = CallQueue()
        self._before = pinned
        self._after_call: list[PinnedChunks] = []
        """What is pinned after each call of the queue."""
        self._plan, self._memory, self._paced, self._pace = plan, memory, paced, pace
        self._is_host_idle = is_host_idle
        self._populating = Populating(partial(self._commit, is_optional=True))

    @property
    def pinned(self) -> PinnedChunks | None:
        """What the pool has, with what is registered by now."""
        made = self.queue.made
        return self._after_call[made - 1] if made else self._before

    @property
    def is_used_up(self) -> bool:
        """Whether all that has been planned is registered."""
        return self.queue.made == len(self._after_call) and not self._populating.is_under_way

    def populate_ahead(self) -> int | None:
        """Populate more chunks if few of those that are have yet to be registered: on this thread, or beside the
        register calls of an idle host. Returns after how many calls it is to be called again; None if there is nothing
        to register. Raises `PinError` if the next chunk cannot be populated."""
        most = self._pace.chunks_ahead
        refill_at = most // _REFILL
        while True:
            self._add(self._populating.take(wait=self.queue.made == len(self._after_call)))
            pending = len(self._after_call) - self.queue.made
            is_idle = self._is_host_idle()
            if pending > (most - refill_at if is_idle else refill_at):
                return len(self._after_call) - refill_at
            if self._populating.is_under_way:
                return len(self._after_call)
            chunks = self._next_chunks(most - pending)
            if chunks and is_idle and pending:
                self._populating.begin(chunks)
                return len(self._after_call)
            if not chunks or not (chunks := self._commit(chunks, is_optional=pending > 0)):
                return len(self._after_call) if pending else None
            self._add(chunks)
            if not is_idle:
                return len(self._after_call) - refill_at

    def end(self) -> None:
        """Give back what is populated and not registered. The queue has been settled."""
        rest = [chunks.last for chunks in self._after_call[self.queue.made :]]
        try:
            rest += self._populating.close()
        finally:
            for chunk in reversed(rest):  # one by one: they may lie in several extents
                self._memory.decommit(chunk)

    def _next_chunks(self, most: int) -> list[Chunk]:
        top = self._after_call[-1] if self._after_call else self._before
        # The first ones alone, so that some slots can be used soon.
        return self._plan(top.last.end_slot if top else 0, min(max(1, len(self._after_call)), most))

    def _add(self, chunks: Sequence[Chunk]) -> None:
        """Let these, which are populated, be registered."""
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
        self.queue.add([Call(partial(self._memory.register, chunk), chunk.num_bytes) for chunk in chunks])

    def _commit(self, chunks: Sequence[Chunk], *, is_optional: bool) -> list[Chunk]:
        """Commit all of them, or else the first one; which of them it did. None only if `is_optional`: then there are
        others to register before this must raise."""
        for tried in (chunks, chunks[:1]):
            try:
                with self._paced.populating():
                    self._memory.commit(_span(tried))
            except PinError:
                if len(tried) == 1 and not is_optional:
                    raise
            else:
                return list(tried)
        return []


def _span(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks that follow each other in memory, as one."""
    first, last = chunks[0], chunks[-1]
    return replace(first, end_slot=last.end_slot, num_bytes=last.end_offset - first.offset)
