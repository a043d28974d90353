"""GPU blocks of vLLM: the keys of their contents, the references that keep them, and the blocks that a step writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

from kvstow.keys import make_key
from kvstow_service.connectors.engine_core.adapters import Adapter
from kvstow_service.connectors.engine_core.kvgroups import KVGroup
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

_GROUP_ID_BYTES = 4  # at the end of a GPU block's hash


class BlockPool(Protocol):
    """The part of vLLM's `BlockPool` that is used. A block with references is neither evicted nor handed out."""

    blocks: list[Any]
    free_block_queue: Any
    null_block: Any

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


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
        """Set if requests may have LoRA adapters."""
        self._sources: dict[int, list[Any]] = {}  # by op

    def offer_of(self, block_hashes: Sequence[bytes], blocks: Sequence[int]) -> Offer:
        """Offers the contents that vLLM caches under these hashes in these blocks. Each hash ends with the hash of the
        block's last hash block and the group's id. With adapters, a block is left out if it is unknown which one has
        computed it."""
        begin = -_GROUP_ID_BYTES - self.hash_bytes
        if self.known_hashes is None:
            keys = [_prefix(each[-_GROUP_ID_BYTES:]) + each[begin:-_GROUP_ID_BYTES] for each in block_hashes]
            return Offer(keys, list(blocks))
        offer = Offer([], [])
        mixed = self.known_hashes.mix([each[begin:-_GROUP_ID_BYTES] for each in block_hashes])
        for block_hash, content, block in zip(block_hashes, mixed, blocks, strict=True):
            if content is not None:
                key = _prefix(block_hash[-_GROUP_ID_BYTES:]) + content
                offer.keys.append(key)
                offer.blocks.append(block)
                if content != (plain := block_hash[begin:-_GROUP_ID_BYTES]):
                    self.known_hashes.note(key, plain)
        return offer

    @property
    def has_sources(self) -> bool:
        """Whether any store's blocks are referenced."""
        return bool(self._sources)

    def num_sources(self) -> int:
        """Referenced blocks, over all stores. O(stores)."""
        return sum(map(len, self._sources.values()))

    def hold_sources(self, op_id: int, block_ids: Sequence[int]) -> None:
        """Reference the blocks that a store reads."""
        blocks = self.pool.blocks
        held = [blocks[block_id] for block_id in block_ids]
        self.pool.touch(held)
        self._sources[op_id] = held

    def free_sources(self, op_id: int, *, to_front: bool = False) -> None:
        """Release the references of a store. Idempotent. The blocks stay cached on the GPU.

        The end of a prefix is evicted before its beginning. With `to_front`, unused blocks return to the head of the
        free queue in their old order, because they came from there.
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
    """Which adapter's requests have which hashes, for blocks that are known only by vLLM's hash of them: those of the
    backlog, of lazy stores, and of recurrent layers. Used by the scheduler's thread.

    A hash that is not known belongs to nobody, so the worst that can happen is that a block is not stored.
    """

    def __init__(self, requests: Mapping[str, TrackedRequest], most: int) -> None:
        """`requests`: the requests that vLLM has, by name; owned by the caller. `most`: how many hashes are kept, those
        of the latest requests."""
        self.note: Callable[[bytes, bytes], None] = lambda key, block_hash: None
        """Takes each key that does not contain vLLM's hash, and the hash, before its block is offered."""
        self._requests, self._most = requests, most
        self._adapters: dict[bytes, Adapter | None] = {}

    def add(self, tracked: TrackedRequest) -> None:
        """Know the hashes that the request has got since the last call."""
        hashes, known = tracked.request.block_hashes, self._adapters
        for number in range(tracked.known_hashes, len(hashes)):
            known.pop(hashes[number], None)  # it is then the latest
            known[hashes[number]] = tracked.adapter
        tracked.known_hashes = len(hashes)
        while len(known) > self._most:
            del known[next(iter(known))]

    def add_ended(self, tracked: TrackedRequest) -> None:
        """Know all hashes of a request that has ended: the GPU now evicts its blocks after those of older requests."""
        tracked.known_hashes = 0
        self.add(tracked)

    def mix(self, hashes: Sequence[bytes]) -> list[bytes | None]:
        """What stands for these hashes in keys; None for those that have none. O(requests) if one is unknown."""
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


class WrittenBlocks:
    """The GPU blocks that a step writes. The step's stores begin before it computes, so they must not read these
    blocks.

    When vLLM plans the step that completes a block, it already names the block by the hash of its future content. The
    hash therefore proves nothing about a block that this step writes, whether the block was allocated in this step or
    in an older one.
    """

    def __init__(
        self,
        number: int = 0,
        scheduled: Iterable[str] = (),
        requests: Mapping[str, TrackedRequest] | None = None,
        groups: Iterable[KVGroup] = (),
        states: Iterable[int] = (),
    ) -> None:
        """`number`: of the step. `groups`: the groups whose blocks are in the tables of the `scheduled` requests.
        `states`: blocks of recurrent layers that the step computes."""
        self._number, self._scheduled = number, scheduled
        self._requests, self._groups, self._states = requests or {}, groups, states

    @cached_property
    def block_ids(self) -> Set[int]:
        """Computed at the first use, in O(scheduled requests): most steps do not need it."""
        found = set(self._states)
        for request_id in self._scheduled:
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            first = max(0, tracked.confirmed_tokens)
            if tracked.admitted_at == self._number:  # another child of MultiConnector may load within this step
                first = min(first, tracked.start)
            for group in self._groups:
                found.update(tracked.tables[group.index][first // group.block_tokens :])
        return found
