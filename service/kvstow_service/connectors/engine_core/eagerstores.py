"""Eager stores: each block is stored once, as soon as its tokens are confirmed. The last blocks are stored when the
request ends."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from kvstow_service.connectors.engine_core.backlog import Backlog
from kvstow_service.connectors.engine_core.gpublocks import GPUBlocks, Offer, WrittenBlocks
from kvstow_service.connectors.engine_core.kvevents import EventFeed
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups, in_token_order
from kvstow_service.connectors.engine_core.stepplan import Step
from kvstow_service.connectors.engine_core.stores import Stores
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest


class EagerStores:
    """Finds complete blocks that were not offered yet.

    It visits a request only while the request has such blocks or soon will: O(blocks), not O(requests) per step. A step
    visits at most `step_blocks` of them. Further blocks of a running request wait in its tables for the next steps.
    Blocks of finished requests, and blocks that were offered but not stored, wait in a `Backlog`. Used by the
    scheduler's thread.
    """

    def __init__(
        self,
        groups: KVGroups,
        gpu: GPUBlocks,
        stores: Stores,
        requests: Mapping[str, TrackedRequest],
        events: EventFeed | None,
        step_blocks: int,
    ) -> None:
        """`requests`: the requests that vLLM has, by name; owned by the caller."""
        self._groups, self._alignment = groups.in_tables, groups.alignment
        self._gpu, self._stores, self._requests, self._events = gpu, stores, requests, events
        self._stride_blocks = sum(self._alignment // group.block_tokens for group in self._groups) or 1
        self._late_tokens = max((group.late_tokens for group in self._groups), default=0)
        self._step_blocks = self._left_for_ends = step_blocks
        self._due: dict[str, TrackedRequest] = {}
        self._backlog = Backlog(gpu)

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def admitted(self, tracked: TrackedRequest) -> None:
        """The blocks that the GPU had cached for the request are offered, too: the pool may have lost them."""
        self._due[tracked.request.request_id] = tracked

    def offer_due(self, step: Step, number: int, written: WrittenBlocks, room: int) -> int:
        """Offer what older steps have completed for the requests that run in this step, and then the backlog, as far as
        the pool has `room`. This step has yet to write the `written` blocks."""
        self._follow_tables(step.scheduled_cached_reqs, number)
        offer, left = self._completed(step.num_scheduled_tokens, written)
        count = min(left, room - len(offer.keys))
        if self._backlog and count > 0:
            keys, blocks = self._backlog.take_cached(count, written.block_ids)
            offer.keys.extend(keys)
            offer.blocks.extend(blocks)
        self._left_for_ends = self._step_blocks
        self._stores.plan_store(offer)
        return len(offer.keys)

    def offer_last(self, tracked: TrackedRequest, tables: Sequence[Sequence[int]]) -> None:
        """Offer what is complete at the end of a request, whose blocks are in `tables`. The request still references
        them. Blocks beyond the limit of one step go to the backlog.

        vLLM has removed from `tables` the blocks that left a window in the request's last step, although it still
        caches them. For a group with a window, this method therefore uses the blocks that the request was given.
        """
        self._due.pop(tracked.request.request_id, None)
        for group in self._groups:
            if group.is_full:
                tracked.tables[group.index] = list(tables[group.index])
        offer = Offer([], [])
        if self._left_for_ends > 0:
            self._left_for_ends -= self._take_next(tracked, self._left_for_ends, WrittenBlocks(), offer)
        self._backlog.add_blocks(self._take_rest(tracked))
        self._stores.plan_store(offer, tracked.request.request_id)

    def offer_again(self, block_ids: Sequence[int]) -> None:
        self._backlog.add_blocks(block_ids)

    def forget_blocks(self) -> None:
        self._backlog.forget_backlog()

    def _follow_tables(self, running: Any, number: int) -> None:
        """Running requests got more GPU blocks, for the tokens of the step that is being planned."""
        for request_id, new_blocks in zip(running.req_ids, running.new_block_ids, strict=True):
            if new_blocks is None:
                continue
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.admitted_at == number:  # at admission, the whole table was given
                continue
            for table, blocks in zip(tracked.tables, new_blocks, strict=True):
                table.extend(blocks)
            self._due[request_id] = tracked

    def _completed(self, scheduled: Container[str], written: WrittenBlocks) -> tuple[Offer, int]:
        """Blocks of the requests that run, and how many more blocks this step may visit. A request that does not run
        has no blocks if it was preempted."""
        offer, left = Offer([], []), self._step_blocks
        for request_id, tracked in list(self._due.items()):
            if request_id not in scheduled:
                continue
            if not tracked.has_run:  # this step may write, for another request, the blocks that it found on the GPU
                tracked.has_run = True
                continue
            if left <= 0:
                continue
            left -= self._take_next(tracked, left, written, offer)
            del self._due[request_id]
            if self._expects_more(tracked):
                self._due[request_id] = tracked  # behind the others, which come first in the next step
        return offer, left

    def _complete_tokens(self, tracked: TrackedRequest) -> int:
        """The number of tokens up to which the request's blocks can be stored, in whole strides of `alignment`, where
        hits end. vLLM caches the blocks of a group with a window no earlier."""
        if tracked.withheld or not tracked.has_keys:
            return 0
        end, num_hashes = tracked.confirmed_tokens - self._late_tokens, len(tracked.request.block_hashes)
        for group in self._groups:
            blocks = min(len(tracked.tables[group.index]), num_hashes // group.hashes_per_block)
            end = min(end, blocks * group.block_tokens)
        return end // self._alignment * self._alignment

    def _expects_more(self, tracked: TrackedRequest) -> bool:
        """Whether there are complete blocks, or may be before the request gets another block: the next one has been
        started."""
        stride_end = tracked.offered_tokens + self._alignment
        if any(len(tracked.tables[group.index]) * group.block_tokens > stride_end for group in self._groups):
            return True
        return self._complete_tokens(tracked) >= stride_end

    def _take_next(self, tracked: TrackedRequest, most: int, written: WrittenBlocks, offer: Offer) -> int:
        """Add about `most` of the request's next complete blocks to the offer. Returns how many blocks were visited."""
        if tracked.adapter is not None:
            tracked.adapter.check()
        alignment, start = self._alignment, tracked.offered_tokens
        strides = min((self._complete_tokens(tracked) - start) // alignment, max(1, most // self._stride_blocks))
        if strides <= 0:
            return 0
        tracked.offered_tokens = end = start + strides * alignment
        found = Offer([], [])
        ends: list[int] = []  # of the blocks found, in tokens
        for group in self._groups:
            first, last = start // group.block_tokens, end // group.block_tokens
            loaded = _blocks_of(tracked.loaded, group)
            for numbers in (range(first, min(last, loaded.start)), range(max(first, loaded.stop), last)):
                if numbers:
                    self._find(tracked, group, numbers, written, found, ends)
        if len(self._groups) > 1:  # as in `KVGroups.places`: the end of a prefix is evicted before its beginning
            order = sorted(range(len(ends)), key=ends.__getitem__)
            found = Offer([found.keys[at] for at in order], [found.blocks[at] for at in order])
        offer.keys.extend(found.keys)
        offer.blocks.extend(found.blocks)
        return strides * self._stride_blocks

    def _find(
        self,
        tracked: TrackedRequest,
        group: KVGroup,
        numbers: range,
        written: WrittenBlocks,
        found: Offer,
        ends: list[int],
    ) -> None:
        keys = tracked.keys(group, numbers.start, numbers.stop)
        blocks = tracked.tables[group.index][numbers.start : numbers.stop]
        if self._events is not None:
            self._events.offered(tracked.request, group, numbers.start, keys)
        if not group.is_full:
            pairs = zip(keys, blocks, numbers, strict=True)
            there = [pair for pair in pairs if self._caches(pair[1], pair[0])]
            if there and not written.block_ids.isdisjoint([block for _, block, _ in there]):
                self._backlog.add_blocks([block for _, block, _ in there if block in written.block_ids])
                there = [pair for pair in there if pair[1] not in written.block_ids]
            keys, blocks = [key for key, _, _ in there], [block for _, block, _ in there]
            ends.extend([(number + 1) * group.block_tokens for _, _, number in there])
        elif len(self._groups) > 1:
            ends.extend([(number + 1) * group.block_tokens for number in numbers])
        found.keys.extend(keys)
        found.blocks.extend(blocks)

    def _caches(self, block: int, key: bytes) -> bool:
        """Whether vLLM caches this content in the block. A block that has left the window may belong to another
        request."""
        block_hash = self._gpu.pool.blocks[block].block_hash
        return block_hash is not None and self._gpu.offer_of([block_hash], [block]).keys == [key]

    def _take_rest(self, tracked: TrackedRequest) -> list[int]:
        """All further complete blocks, the root of the prefix first. They count as offered."""
        start, end = tracked.offered_tokens, self._complete_tokens(tracked)
        if start >= end:
            return []
        tracked.offered_tokens = end
        runs = [
            (group, tracked.tables[group.index][start // group.block_tokens : end // group.block_tokens])
            for group in self._groups
        ]
        return in_token_order(runs)


def _blocks_of(tokens: range, group: KVGroup) -> range:
    """The group's blocks that hold these tokens."""
    if not tokens:
        return range(0)
    return range(tokens.start // group.block_tokens, -(-tokens.stop // group.block_tokens))
