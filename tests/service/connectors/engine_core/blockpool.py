"""vLLM's block pool, as far as a connector uses it: references, hashes, and the queue of free blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.is_null = False
        self.block_hash: bytes | None = None
        self.prev_free_block: Block | None = None
        self.next_free_block: Block | None = None


class FreeQueue:
    """A linked list from the next block to be evicted to the last, between two ends that are no blocks."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.fake_free_list_head, self.fake_free_list_tail = Block(-1), Block(-1)
        _link(self.fake_free_list_head, self.fake_free_list_tail)
        self.append(blocks)

    def __iter__(self) -> Iterator[Block]:
        block = self.fake_free_list_head.next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            yield block
            block = block.next_free_block

    def append(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            last = self.fake_free_list_tail.prev_free_block
            assert last is not None
            _link(last, block)
            _link(block, self.fake_free_list_tail)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        for block in reversed(blocks):
            first = self.fake_free_list_head.next_free_block
            assert first is not None
            _link(block, first)
            _link(self.fake_free_list_head, block)

    def remove(self, block: Block) -> None:
        assert block.prev_free_block is not None, f"block {block.block_id} is not free"
        assert block.next_free_block is not None
        _link(block.prev_free_block, block.next_free_block)
        block.prev_free_block = block.next_free_block = None


def _link(before: Block, after: Block) -> None:
    before.next_free_block, after.prev_free_block = after, before


class FakeBlockPool:
    """Blocks with references are neither evicted nor handed out; those without wait in the queue, cached or not."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.free_block_queue = FreeQueue(self.blocks)
        self.null_block = self.take(1)[0]
        self.null_block.is_null = True

    @property
    def free(self) -> list[int]:
        """Ids of the free blocks, the next to be evicted first."""
        return [block.block_id for block in self.free_block_queue]

    def take(self, count: int) -> list[Block]:
        """Hand out free blocks; what they cached is evicted."""
        taken = [block for block, _ in zip(self.free_block_queue, range(count), strict=False)]
        assert len(taken) == count, f"{count} blocks are wanted, {len(taken)} are free"
        for block in taken:
            self.free_block_queue.remove(block)
            block.block_hash, block.ref_cnt = None, 1
        return taken

    def cached(self, block_hash: bytes) -> Block | None:
        return next((block for block in self.blocks if block.block_hash == block_hash), None)

    def reset_prefix_cache(self) -> bool:
        """Nothing is cached any more, unless a block is in use."""
        if any(block.ref_cnt for block in self.blocks if not block.is_null):
            return False
        for block in self.blocks:
            block.block_hash = None
        return True

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        for number in block_ids:
            self.blocks[number].block_hash = None

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        cached: list[Block] = []
        others: list[Block] = []
        for block in ordered_blocks:
            assert block.ref_cnt > 0 or block.is_null, f"block {block.block_id} is given back once too often"
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                (others if block.block_hash is None else cached).append(block)
        self.free_block_queue.prepend_n(others)
        self.free_block_queue.append(cached)
