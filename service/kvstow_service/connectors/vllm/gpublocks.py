"""Source blocks: GPU blocks that the pool may still read, kept from reuse by references."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class BlockPool(Protocol):
    """What is used of vLLM's `BlockPool`. A block with references is neither evicted nor handed out."""

    blocks: list[Any]
    free_block_queue: Any
    null_block: Any

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


class SourceBlocks:
    """The blocks of the stores under way. Used by the scheduler's thread.

    A store's blocks are referenced from the moment it is planned until every rank has read them: a request that
    ends or is preempted meanwhile cannot take them away, and no flush is ever needed.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        """Stores whose blocks are held."""
        return len(self._held)

    def hold(self, op_id: int, block_ids: Sequence[int]) -> None:
        blocks = self._pool.blocks
        held = [blocks[block_id] for block_id in block_ids]
        self._pool.touch(held)
        self._held[op_id] = held

    def num_blocks(self) -> int:
        """All that are held. O(stores)."""
        return sum(map(len, self._held.values()))

    def release(self, op_id: int) -> None:
        """Idempotent. The blocks stay cached on the GPU; the end of a prefix is evicted before its beginning."""
        held = self._held.pop(op_id, None)
        if held is not None:
            self._pool.free_blocks(reversed(held))

    def release_first(self, op_id: int) -> None:
        """As `release`, but those that nobody uses are the next to be evicted: they were when they were taken."""
        held = self._held.pop(op_id, None)
        if held is None:
            return
        self._pool.free_blocks(held)
        queue, unused = self._pool.free_block_queue, [block for block in held if block.ref_cnt == 0]
        for block in unused:
            queue.remove(block)
        queue.prepend_n(unused)
