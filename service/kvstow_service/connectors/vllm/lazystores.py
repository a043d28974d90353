"""Lazy stores: blocks that the GPU's cache is about to evict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstow.control.engine import OffloadEngine
from kvstow_service.connectors.vllm.gpublocks import BlockPool
from kvstow_service.connectors.vllm.offers import Offer, keys_of


class LazyStores:
    """Keeps the first `ahead_blocks` of the GPU's free queue, the next to be evicted, in the pool too.

    Blocks that are stored go back to where they were in the queue: the GPU's order of eviction stays, and no more than
    those first ones is ever stored. A step looks at the queue only if its head has changed since the last look, fewer
    blocks were free then, or blocks wait that were offered in vain; 60 ns a block. It offers `step_blocks` at most.
    Used by the scheduler's thread.
    """

    def __init__(self, engine: OffloadEngine, pool: BlockPool, ahead_blocks: int, step_blocks: int) -> None:
        self.hash_bytes = 0
        """Length of a request's block hash; 0 until a request came."""
        self._engine, self._pool = engine, pool
        self._ahead_blocks, self._step_blocks = ahead_blocks, step_blocks
        self._head: Any = None
        self._offered: dict[int, bytes] = {}  # by block: the content that was offered
        self._in_vain: dict[int, bytes] = {}  # likewise, but the pool did not take it

    @property
    def has_backlog(self) -> bool:
        """Whether blocks that were not stored wait for another offer."""
        return bool(self._in_vain)

    def take_endangered(self, held: int, room: int) -> Offer:
        """Blocks near eviction that were not offered yet and are not in the pool. `held` blocks are being stored, and
        will be the first again. Those offered in vain come again if the pool has `room`, and no more than that."""
        most = self._step_blocks
        if room:
            most = min(most, room)
            if self._in_vain:
                self._in_vain, self._head = {}, None
        queue = self._pool.free_block_queue
        block, tail = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
        if block is self._head or not self.hash_bytes:
            return Offer([], [])
        self._head = block
        hashes: list[bytes] = []
        blocks: list[int] = []
        for _ in range(self._ahead_blocks - held):
            if block is None or block is tail or len(blocks) == most:
                self._head = None  # what is freed next is near eviction at once; what is too much comes next
                break
            content, block_id = block.block_hash, block.block_id
            if content is not None and content not in (self._offered.get(block_id), self._in_vain.get(block_id)):
                self._offered[block_id] = content
                hashes.append(content)
                blocks.append(block_id)
            block = block.next_free_block
        return self._missing(Offer(keys_of(hashes, self.hash_bytes), blocks))

    def offer_again(self, block_ids: Sequence[int]) -> None:
        """These were offered and not stored."""
        for block_id in block_ids:
            content = self._offered.pop(block_id, None)
            if content is not None:
                self._in_vain[block_id] = content

    def forget(self) -> None:
        """The pool was emptied."""
        self._offered.clear()
        self._in_vain.clear()
        self._head = None

    def _missing(self, found: Offer) -> Offer:
        there = self._engine.contains(found.keys) if found.keys else ()
        kept = [pair for pair, is_there in zip(zip(*found, strict=True), there, strict=True) if not is_there]
        return Offer([key for key, _ in kept], [block for _, block in kept])
