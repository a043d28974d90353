"""The backlog: GPU blocks that still have to be stored, and when to try again after a failure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set

from kvstow_service.connectors.engine_core.gpublocks import GPUBlocks, Offer

_LONGEST_PAUSE = 256


class Backlog:
    """GPU blocks whose store was refused, dropped or failed, or did not fit into a step. Used by one thread.

    Nothing holds these blocks: the GPU may evict one before it is offered. Each is offered under the hash by which vLLM
    caches it at that time, not the hash that it had when it was added. It is not offered if vLLM caches nothing in it.
    Each block waits at most once, so the backlog never holds more blocks than the GPU has.
    """

    def __init__(self, gpu: GPUBlocks) -> None:
        self._gpu = gpu
        self._queue: deque[int] = deque()
        self._queued: set[int] = set()

    def __len__(self) -> int:
        return len(self._queue)

    def add_blocks(self, block_ids: Iterable[int]) -> None:
        """Append these blocks. Blocks that already wait keep their place."""
        queued, new = self._queued, list(dict.fromkeys(block_ids))
        if queued:
            new = [block_id for block_id in new if block_id not in queued]
        queued.update(new)
        self._queue.extend(new)

    def take_cached(self, count: int, unwritten: Set[int]) -> Offer:
        """Offer the blocks that vLLM caches among the first `count`, and forget the other blocks of these. Blocks in
        `unwritten`, which the step being planned has yet to write, stay in the backlog. O(count)."""
        gpu_blocks, queue, queued = self._gpu.pool.blocks, self._queue, self._queued
        hashes: list[bytes] = []
        blocks: list[int] = []
        waiting: list[int] = []
        for _ in range(min(count, len(queue))):
            block_id = queue.popleft()
            if block_id in unwritten:
                waiting.append(block_id)
                continue
            queued.discard(block_id)
            block_hash = gpu_blocks[block_id].block_hash
            if block_hash is not None:
                hashes.append(block_hash)
                blocks.append(block_id)
        queue.extend(waiting)
        return self._gpu.offer_of(hashes, blocks)

    def forget_backlog(self) -> None:
        self._queue.clear()
        self._queued.clear()


class RetryPause:
    """Steps to wait before blocks are offered again: none after the first failure, then 1, 2, 4 and so on up to 256."""

    def __init__(self) -> None:
        self._left = self._next = 0

    def __bool__(self) -> bool:
        """Whether the pause continues."""
        return self._left > 0

    def step(self) -> None:
        """A step begins."""
        self._left = max(0, self._left - 1)

    def failed(self) -> None:
        """A store has failed. Ignored during a pause, because that store was planned before the pause began."""
        if not self._left:
            self._left, self._next = self._next, min(max(1, 2 * self._next), _LONGEST_PAUSE)

    def succeeded(self) -> None:
        self._left = self._next = 0
