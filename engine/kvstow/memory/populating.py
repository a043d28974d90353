"""Chunks that are populated while those before them are registered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvstow.memory.chunks import Chunk

logger = logging.getLogger("kvstow.pool")


class Populating:
    """Populates chunks on a thread of its own, which starts with the first ones. Used by one other thread, the pinning
    thread, which calls `close` last."""

    def __init__(self, commit: Callable[[Sequence[Chunk]], list[Chunk]]) -> None:
        """`commit(chunks)` returns those that it has populated."""
        self._commit = commit
        self._thread: ThreadPoolExecutor | None = None
        self._chunks: Future[list[Chunk]] | None = None
        self._has_no_thread = False

    @property
    def is_under_way(self) -> bool:
        """Whether chunks have been begun and not taken."""
        return self._chunks is not None

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Populate these. None may be under way. If the process can start no thread, this call populates them itself,
        and raises what `commit` raises."""
        assert self._chunks is None
        if not self._has_no_thread:
            thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="kvstow-ahead")
            try:
                self._chunks = thread.submit(self._commit, chunks)
                self._thread = thread
                return
            except RuntimeError as error:
                self._has_no_thread = True
                logger.warning("memory is not populated ahead, so pinning takes longer: %s", error)
        done = Future[list[Chunk]]()
        done.set_result(self._commit(chunks))
        self._chunks = done

    def take(self, *, wait: bool) -> list[Chunk]:
        """The chunks that have been populated since the last time; none if they are not finished, unless `wait`. Raises
        what `commit` raised."""
        chunks = self._chunks
        if chunks is None or not (wait or chunks.done()):
            return []
        self._chunks = None
        return chunks.result()

    def close(self) -> list[Chunk]:
        """End the thread. The chunks that have been populated and were not taken. Raises what `commit` raised."""
        try:
            return self.take(wait=True)
        finally:
            if self._thread is not None:
                self._thread.shutdown()
