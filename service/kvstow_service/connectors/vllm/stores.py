"""Eager stores: each block once, as soon as its tokens are confirmed, and the last ones when the request ends."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple, Protocol

from kvstow.keys import make_key
from kvstow_service.connectors.vllm.groups import KVGroup, KVGroups
from kvstow_service.connectors.vllm.requests import TrackedRequest

_GROUP_ID_BYTES = 4  # at the end of a GPU block's hash


class Offer(NamedTuple):
    """Blocks that could be stored: `blocks[i]` holds the content that `keys[i]` names."""

    keys: list[bytes]
    blocks: list[int]


class OfferObserver(Protocol):
    """Hears of each run of blocks that is offered: those of one request and group, from its `first_block` on."""

    def offered(self, request: Any, group: KVGroup, first_block: int, keys: Sequence[bytes]) -> None: ...


class EagerStores:
    """Finds the blocks of running requests that are complete and were not offered yet.

    A request is looked at only while it has such blocks, or soon will: O(blocks), not O(requests) per step.
    Used by the scheduler's thread.
    """

    def __init__(self, groups: KVGroups, gpu_blocks: Sequence[Any], observer: OfferObserver | None) -> None:
        """`gpu_blocks[block_id]` is vLLM's `KVCacheBlock`."""
        self._groups, self._has_windows = groups.in_tables, bool(groups.partial)
        self._gpu_blocks, self._observer = gpu_blocks, observer
        self._due: dict[str, TrackedRequest] = {}
        self._fresh: set[int] = set()

    def admitted(self, tracked: TrackedRequest) -> None:
        """The request has its tables; what the GPU had cached of it is offered too: the pool may have lost it."""
        self._due[tracked.request.request_id] = tracked
        if self._has_windows:
            self._fresh.update(block for table in tracked.tables for block in table)

    def grown(self, tracked: TrackedRequest, new_blocks: Sequence[Sequence[int]]) -> None:
        """The request got more GPU blocks, for tokens of the step that is being planned."""
        for table, blocks in zip(tracked.tables, new_blocks, strict=True):
            table.extend(blocks)
        self._due[tracked.request.request_id] = tracked
        if self._has_windows:
            self._fresh.update(block for blocks in new_blocks for block in blocks)

    def take_due(self, scheduled: Container[str]) -> Offer:
        """What older steps have completed of the requests that run in this step. Ends the planning of a step.

        A request that does not run has no blocks, if it was preempted."""
        offer = Offer([], [])
        for request_id, tracked in list(self._due.items()):
            if request_id not in scheduled:
                continue
            if not tracked.has_run:  # what it found on the GPU may be written, for another request, in this very step
                tracked.has_run = True
                continue
            self._take(tracked, offer)
            if not self._expects_more(tracked):
                del self._due[request_id]
        self._fresh.clear()
        return offer

    def take_last(self, tracked: TrackedRequest, tables: Sequence[Sequence[int]]) -> Offer:
        """What is complete at the end of a request, whose blocks these are: it still references them."""
        self._due.pop(tracked.request.request_id, None)
        tracked.tables = [list(table) for table in tables]
        offer = Offer([], [])
        self._take(tracked, offer)
        return offer

    def _expects_more(self, tracked: TrackedRequest) -> bool:
        """Whether a complete block may be there before the request gets another: one has been begun after it."""
        tables, cursors = tracked.tables, tracked.cursors
        return any(len(table) > cursor + 1 for table, cursor in zip(tables, cursors, strict=True))

    def _take(self, tracked: TrackedRequest, offer: Offer) -> None:
        if tracked.withheld:
            return
        confirmed, found = tracked.confirmed_tokens, Offer([], [])
        ends: list[int] = []  # of the blocks found, in tokens
        for group in self._groups:
            table, first = tracked.tables[group.index], tracked.cursors[group.index]
            end = min(confirmed // group.block_tokens, len(table))
            if end <= first:
                continue
            end = first + len(tracked.keys(group, first, end))
            tracked.cursors[group.index] = end
            loaded = _blocks_of(tracked.loaded, group)
            for numbers in (range(first, min(end, loaded.start)), range(max(first, loaded.stop), end)):
                if numbers:
                    self._find(tracked, group, numbers, found, ends)
        if len(self._groups) > 1:  # as in `KVGroups.places`: the end of a prefix is evicted before its beginning
            order = sorted(range(len(ends)), key=ends.__getitem__)
            found = Offer([found.keys[at] for at in order], [found.blocks[at] for at in order])
        offer.keys.extend(found.keys)
        offer.blocks.extend(found.blocks)

    def _find(self, tracked: TrackedRequest, group: KVGroup, numbers: range, found: Offer, ends: list[int]) -> None:
        keys = tracked.keys(group, numbers.start, numbers.stop)
        blocks = tracked.tables[group.index][numbers.start : numbers.stop]
        if self._observer is not None:
            self._observer.offered(tracked.request, group, numbers.start, keys)
        if not group.is_full:
            pairs = zip(keys, blocks, numbers, strict=True)
            there = [pair for pair in pairs if self._is_still_there(pair[0], pair[1])]
            keys, blocks = [key for key, _, _ in there], [block for _, block, _ in there]
            ends.extend([(number + 1) * group.block_tokens for _, _, number in there])
        elif len(self._groups) > 1:
            ends.extend([(number + 1) * group.block_tokens for number in numbers])
        found.keys.extend(keys)
        found.blocks.extend(blocks)

    def _is_still_there(self, key: bytes, block: int) -> bool:
        """A block that has left the window may be anybody's by now: only what is cached under its hash counts. A block
        handed out in this very step bears the hash of what will be written."""
        return block not in self._fresh and _content_is(self._gpu_blocks[block], key)


def _blocks_of(tokens: range, group: KVGroup) -> range:
    """The group's blocks that hold these tokens."""
    if not tokens:
        return range(0)
    return range(tokens.start // group.block_tokens, -(-tokens.stop // group.block_tokens))


def key_of(block_hash: bytes, hash_bytes: int) -> bytes:
    """Our key for the content that vLLM caches under `block_hash`: it ends with the hash of the last hash block, which
    has `hash_bytes`, and the group's id."""
    group = int.from_bytes(block_hash[-_GROUP_ID_BYTES:], "big")
    return make_key(group, block_hash[-_GROUP_ID_BYTES - hash_bytes : -_GROUP_ID_BYTES])


def _content_is(gpu_block: Any, key: bytes) -> bool:
    """Whether vLLM caches the content of `key` in the block."""
    block_hash = gpu_block.block_hash
    return block_hash is not None and key_of(block_hash, len(key) - len(make_key(0, b""))) == key
