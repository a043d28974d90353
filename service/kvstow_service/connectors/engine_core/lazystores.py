"""Lazy stores: blocks that the GPU's cache is about to evict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstow_service.connectors.engine_core.controlplane import ControlPlane
from kvstow_service.connectors.engine_core.gpublocks import GPUBlocks, Offer, WrittenBlocks
from kvstow_service.connectors.engine_core.stepplan import Step
from kvstow_service.connectors.engine_core.stores import Stores
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest


class LazyStores:
    """Finds the first `ahead_blocks` of the GPU's free queue, the next to be evicted, and stores them.

    Stored blocks return to their old place in the queue, so the GPU's order of eviction does not change. Only those
    first blocks are ever stored. A step reads the queue, at 60 ns a block, in three cases: its head has changed since
    the last read, fewer blocks were free then, or blocks wait that were not stored. A step offers at most
    `step_blocks`. Used by the scheduler's thread.
    """

    def __init__(
        self, control: ControlPlane, gpu: GPUBlocks, stores: Stores, ahead_blocks: int, step_blocks: int
    ) -> None:
        self._control, self._gpu, self._stores = control, gpu, stores
        self._ahead_blocks, self._step_blocks = ahead_blocks, step_blocks
        self._head: Any = None
        self._offered: dict[int, bytes] = {}  # by block: the content that was offered
        self._not_stored: dict[int, bytes] = {}  # the same, for blocks that the pool did not take

    @property
    def has_backlog(self) -> bool:
        return bool(self._not_stored)

    def admitted(self, tracked: TrackedRequest) -> None:
        """Lazy stores use no block tables. The request counts as one that has run, and so as a use of its blocks."""
        tracked.has_run = True

    def offer_due(self, step: Step, number: int, written: WrittenBlocks, room: int) -> int:
        """Offer blocks near eviction that were not offered yet and are not in the pool. Blocks that are being stored
        return to the front of the queue. Blocks that were not stored are offered again, up to the pool's `room`."""
        most = self._step_blocks
        if room:
            most = min(most, room)
            if self._not_stored:
                self._not_stored, self._head = {}, None
        offer = self._missing(self._next_evicted(most))
        if offer.keys:
            self._stores.plan_store(offer)
        return len(offer.keys)

    def offer_last(self, tracked: TrackedRequest, tables: Sequence[Sequence[int]]) -> None:
        """Does nothing: the blocks of an ended request join the free queue."""

    def offer_again(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            content = self._offered.pop(block_id, None)
            if content is not None:
                self._not_stored[block_id] = content

    def forget_blocks(self) -> None:
        self._offered.clear()
        self._not_stored.clear()
        self._head = None

    def _next_evicted(self, most: int) -> Offer:
        queue = self._gpu.pool.free_block_queue
        block, tail = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
        if block is self._head or not self._gpu.hash_bytes:
            return Offer([], [])
        self._head = block
        hashes: list[bytes] = []
        blocks: list[int] = []
        for _ in range(self._ahead_blocks - self._gpu.num_sources()):
            if block is None or block is tail or len(blocks) == most:
                self._head = None  # look again, for blocks freed next or blocks beyond `most`
                break
            content, block_id = block.block_hash, block.block_id
            if content is not None and content not in (self._offered.get(block_id), self._not_stored.get(block_id)):
                self._offered[block_id] = content
                hashes.append(content)
                blocks.append(block_id)
            block = block.next_free_block
        return self._gpu.offer_of(hashes, blocks)

    def _missing(self, found: Offer) -> Offer:
        there = self._control.present(found.keys) if found.keys else ()
        kept = [pair for pair, is_there in zip(zip(*found, strict=True), there, strict=True) if not is_there]
        return Offer([key for key, _ in kept], [block for _, block in kept])
