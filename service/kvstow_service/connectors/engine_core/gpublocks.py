"""The blocks of vLLM's GPU pool, as stores use them: the keys of their contents, the references that keep them, and the
backlog of blocks that still have to be stored."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cache
from typing import Any, NamedTuple, Protocol

from kvstow.keys import make_key
from kvstow_service.connectors.engine_core.adapters import Adapter
from kvstow_service.connectors.engine_core.hints import UnstoredHashes
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

_GROUP_ID_BYTES = 4
"""Bytes of the group's id, with which the hash of a GPU block ends."""


class BlockPool(Protocol):
    """The part of vLLM's `BlockPool` that is used. A block with references is neither evicted nor handed out."""

    blocks: list[Any]
    free_block_queue: Any
    null_block: Any

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...

    def reset_prefix_cache(self) -> bool: ...

    def evict_blocks(self, block_ids: Set[int]) -> None: ...


class Offer(NamedTuple):
    """Blocks that could be stored: `blocks[i]` holds the content that `keys[i]` names."""

    keys: list[bytes]
    blocks: list[int]


class GPUBlocks:
    """The blocks of vLLM's pool, as stores use them. Used by the scheduler's thread.

    The blocks of a store are referenced from the moment the store is planned until every rank has read them. A request
    that ends or is preempted meanwhile cannot take them away, so no flush is needed.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.hash_bytes = 0
        """Length of a request's block hash; 0 until a request has one."""
        self.known_hashes: KnownHashes | None = None
        """The hashes of requests; None if requests cannot have LoRA adapters."""
        self.unstored: UnstoredHashes | None = None
        """The hashes of requests that must not be stored; None if there are no such requests."""
        self._sources: dict[int, list[Any]] = {}  # by op
        self.lost_blocks = 0
        """How many blocks vLLM evicted while they waited in the backlog to be stored."""

    def forget(self, blocks: Set[int]) -> None:
        """Take the blocks out of vLLM's prefix cache: they do not contain what their hashes name. Requests keep
        them."""
        self.pool.evict_blocks(blocks)

    def offer_of(self, block_hashes: Sequence[bytes], blocks: Sequence[int]) -> Offer:
        """Offer the contents that vLLM caches under these hashes in these blocks. Each hash ends with the hash of the
        block's last hash block and the group's id. If there are adapters, a block is left out if it is unknown which of
        them has computed it."""
        begin = -_GROUP_ID_BYTES - self.hash_bytes
        if self.known_hashes is None:
            keys = [_prefix(each[-_GROUP_ID_BYTES:]) + each[begin:-_GROUP_ID_BYTES] for each in block_hashes]
            return Offer(keys, list(blocks))
        offer = Offer([], [])
        mixed = self.known_hashes.mix([each[begin:-_GROUP_ID_BYTES] for each in block_hashes])
        for block_hash, content, block in zip(block_hashes, mixed, blocks, strict=True):
            if content is not None:
                offer.keys.append(_prefix(block_hash[-_GROUP_ID_BYTES:]) + content)
                offer.blocks.append(block)
        return offer

    def is_unstored(self, block_hash: bytes) -> bool:
        """Whether a request that must not be stored has computed the block that vLLM caches under this hash."""
        begin = -_GROUP_ID_BYTES - self.hash_bytes
        return self.unstored is not None and block_hash[begin:-_GROUP_ID_BYTES] in self.unstored

    @property
    def has_sources(self) -> bool:
        return bool(self._sources)

    def num_sources(self) -> int:
        """The number of referenced blocks of all stores. O(stores)."""
        return sum(map(len, self._sources.values()))

    def hold_sources(self, op_id: int, block_ids: Sequence[int]) -> None:
        blocks = self.pool.blocks
        held = [blocks[block_id] for block_id in block_ids]
        self.pool.touch(held)
        self._sources[op_id] = held

    def free_sources(self, op_id: int, *, to_front: bool = False) -> None:
        """Release the references of a store. Idempotent. The blocks stay cached on the GPU.

        The blocks are freed so that vLLM evicts the end of a prefix before its beginning. With `to_front`, unused
        blocks return to the head of the free queue in their old order, because they came from there.
        """
        held = self._sources.pop(op_id, None)
        if held is None:
            return
        if not to_front:
            self.pool.free_blocks(reversed(held))
            return
        self.pool.free_blocks(held)
        queue, unused = self.pool.free_block_queue, [block for block in held if block.ref_cnt == 0]
        for block in unused:
            queue.remove(block)
        queue.prepend_n(unused)


@cache
def _prefix(group_id: bytes) -> bytes:
    return make_key(int.from_bytes(group_id, "big"), b"")


class KnownHashes:
    """Knows the adapter of each hash, for blocks of which only vLLM's hash is known: blocks of the backlog, of lazy
    stores, and of recurrent layers. Used by the scheduler's thread.

    A block whose hash is not known here is not stored, so a forgotten hash can cost a later hit, but gives no request
    the KV of another adapter.
    """

    def __init__(self, requests: Mapping[str, TrackedRequest], most: int) -> None:
        """`requests`: the requests that vLLM has, by name; owned by the caller. `most`: how many hashes are kept; those
        of the oldest requests are dropped."""
        self._requests, self._most = requests, most
        self._adapters: dict[bytes, Adapter | None] = {}

    def add(self, tracked: TrackedRequest) -> None:
        hashes, known = tracked.request.block_hashes, self._adapters
        for number in range(tracked.known_hashes, len(hashes)):
            known.pop(hashes[number], None)  # so that it becomes the latest
            known[hashes[number]] = tracked.adapter
        tracked.known_hashes = len(hashes)
        while len(known) > self._most:
            del known[next(iter(known))]

    def add_ended(self, tracked: TrackedRequest) -> None:
        """Make all hashes of a request that has ended the latest, because the GPU evicts its blocks after those of
        older requests."""
        tracked.known_hashes = 0
        self.add(tracked)

    def mix(self, hashes: Sequence[bytes]) -> list[bytes | None]:
        """The bytes that stand for these hashes in keys; None for a hash that has no key. O(requests) if one of them is
        unknown."""
        known = self._adapters
        if any(each not in known for each in hashes):
            for tracked in self._requests.values():
                self.add(tracked)
        return [self._mix(each) if each in known else None for each in hashes]

    def _mix(self, block_hash: bytes) -> bytes | None:
        adapter = self._adapters[block_hash]
        if adapter is None:
            return block_hash
        return adapter.mix(block_hash) if adapter.check() else None


_KEPT_SHARE = 8
"""At most one in this many of the GPU's blocks is kept for the backlog after its request has ended."""
_KEPT_SECONDS = 2.0
"""How many seconds such a block is kept."""


class Backlog:
    """GPU blocks whose store was refused, dropped or failed, or did not fit into a step. Used by one thread.

    A bounded number of blocks of requests that have just ended can be kept on the GPU for a short time. Nothing keeps
    the others, so the GPU may evict one before it is offered. A block is offered under the hash by which vLLM caches it
    at that time, and not under the hash that it had when it was added. If vLLM caches nothing in it by then, it is
    counted and not offered. Each block waits at most once, so the backlog never has more blocks than the GPU.
    """

    def __init__(self, gpu: GPUBlocks, clock: Callable[[], float] = time.monotonic) -> None:
        self._gpu, self._clock = gpu, clock
        self._queue: deque[int] = deque()
        self._queued: set[int] = set()
        self._kept: dict[int, float] = {}
        """Blocks that are kept by a reference, and until when."""
        self._taken: list[int] = []
        """Kept blocks that were offered since the last `release_taken`. They still have their reference."""

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def keeps_blocks(self) -> bool:
        return bool(self._kept)

    def add_blocks(self, block_ids: Iterable[int], *, keep: bool = False) -> None:
        """Append these blocks. Blocks that already wait keep their place. `keep`: keep them on the GPU for a while."""
        queued, new = self._queued, list(dict.fromkeys(block_ids))
        if queued:
            new = [block_id for block_id in new if block_id not in queued]
        queued.update(new)
        self._queue.extend(new)
        room = len(self._gpu.pool.blocks) // _KEPT_SHARE - len(self._kept)
        if keep and room > 0 and new:
            kept = new[:room]
            self._gpu.pool.touch([self._gpu.pool.blocks[block_id] for block_id in kept])
            self._kept.update(dict.fromkeys(kept, self._clock() + _KEPT_SECONDS))

    def release_taken(self) -> None:
        """Release the references of blocks that were offered: if they are being stored, the store has references of its
        own. Also release those of blocks that were kept for long enough."""
        taken, self._taken = self._taken, []
        if self._kept:
            now = self._clock()
            for block_id, until in list(self._kept.items()):
                if until > now:
                    break
                taken.append(block_id)
                del self._kept[block_id]
        self._free(taken)

    def _free(self, block_ids: Sequence[int]) -> None:
        self._gpu.pool.free_blocks(reversed([self._gpu.pool.blocks[block_id] for block_id in block_ids]))

    def take_cached(self, count: int, unwritten: Set[int]) -> Offer:
        """Offer those of the first `count` blocks that vLLM caches, and forget the others. Blocks in `unwritten`, which
        the step being planned has yet to write, stay in the backlog. O(count)."""
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
            if self._kept.pop(block_id, None) is not None:
                self._taken.append(block_id)
            block_hash = gpu_blocks[block_id].block_hash
            self._gpu.lost_blocks += block_hash is None
            if block_hash is not None and not self._gpu.is_unstored(block_hash):
                hashes.append(block_hash)
                blocks.append(block_id)
        queue.extend(waiting)
        return self._gpu.offer_of(hashes, blocks)

    def forget_backlog(self) -> None:
        self._queue.clear()
        self._queued.clear()
        kept, self._kept = [*self._kept, *self._taken], {}
        self._taken = []
        self._free(kept)
