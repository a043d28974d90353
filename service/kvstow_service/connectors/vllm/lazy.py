"""Lazy stores: blocks that the GPU's cache is about to evict."""

from __future__ import annotations

from typing import Any

from kvstow.control.engine import OffloadEngine
from kvstow_service.connectors.vllm.sources import BlockPool
from kvstow_service.connectors.vllm.stores import Offer, key_of


class LazyStores:
    """Keeps the first `ahead_blocks` of the GPU's free queue, the next to be evicted, in the pool too.

    Blocks that are stored go back to where they were in the queue: the GPU's order of eviction stays, and no more than
    those first ones is ever stored. A step looks at the queue only if its head has changed since the last look, or
    fewer blocks were free then; 60 ns a block. Used by the scheduler's thread.
    """

    def __init__(self, engine: OffloadEngine, pool: BlockPool, ahead_blocks: int) -> None:
        self.hash_bytes = 0
        """Length of a request's block hash; 0 until a request came."""
        self._engine, self._pool = engine, pool
        self._ahead_blocks = ahead_blocks
        self._head: Any = None
        self._offered: dict[int, bytes] = {}  # by block: the content that was offered, whatever came of it

    def take_endangered(self, held: int) -> Offer:
        """Blocks near eviction that were not offered yet and are not in the pool. `held` blocks are being stored, and
        will be the first again."""
        queue = self._pool.free_block_queue
        block, tail = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
        if block is self._head or not self.hash_bytes:
            return Offer([], [])
        self._head = block
        found = Offer([], [])
        for _ in range(self._ahead_blocks - held):
            if block is None or block is tail:
                self._head = None  # what is freed next is near eviction at once
                break
            content = block.block_hash
            if content is not None and self._offered.get(block.block_id) != content:
                self._offered[block.block_id] = content
                found.keys.append(key_of(content, self.hash_bytes))
                found.blocks.append(block.block_id)
            block = block.next_free_block
        return self._missing(found)

    def forget(self) -> None:
        """The pool was emptied."""
        self._offered.clear()
        self._head = None

    def _missing(self, found: Offer) -> Offer:
        there = self._engine.contains(found.keys) if found.keys else ()
        kept = [pair for pair, is_there in zip(zip(*found, strict=True), there, strict=True) if not is_there]
        return Offer([key for key, _ in kept], [block for _, block in kept])
