"""Stores: the GPU blocks that are worth storing, from their offer to the end of the copies.

Eager stores take each block once, as soon as its tokens are confirmed, and the last blocks when the request ends. Lazy
stores take blocks that the GPU's cache is about to evict. The states of recurrent layers (Mamba) are blocks that sum up
all tokens before them instead of holding some."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstow.attach.wire import MOST_STORED
from kvstow.results import Awaited, Settled, StoreGrant
from kvstow_service.connectors.engine_core.controlplane import ControlPlane
from kvstow_service.connectors.engine_core.gpublocks import Backlog, GPUBlocks, Offer
from kvstow_service.connectors.engine_core.kvevents import EventFeed
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups, in_token_order
from kvstow_service.connectors.engine_core.stepplan import StepDraft
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

_LONGEST_PAUSE = 256
"""The longest pause between two offers of the same blocks, in steps."""


class RetryPause:
    """Steps to wait before blocks are offered again: none after the first failure, then 1, 2, 4 and so on up to 256."""

    def __init__(self) -> None:
        self._left = self._next = 0

    def __bool__(self) -> bool:
        return self._left > 0

    def step(self) -> None:
        self._left = max(0, self._left - 1)

    def failed(self) -> None:
        """Note that a store has failed. It does not count during a pause, because that store was planned before the
        pause began."""
        if not self._left:
            self._left, self._next = self._next, min(max(1, 2 * self._next), _LONGEST_PAUSE)

    def succeeded(self) -> None:
        self._left = self._next = 0


class _AskedStore(NamedTuple):
    """Store `number`, for which the pool has not found slots yet."""

    number: int
    offer: Offer
    answer: Awaited[StoreGrant]


class Stores:
    """Plans stores and follows them to their end. Used by the scheduler's thread.

    The blocks of a store are referenced from the moment the store is requested until every rank has read them.
    """

    def __init__(
        self, control: ControlPlane, draft: StepDraft, gpu: GPUBlocks, events: EventFeed | None, *, to_front: bool
    ) -> None:
        """`to_front`: blocks come from the head of the GPU's free queue, and return there."""
        self._control, self._draft, self._gpu = control, draft, gpu
        self._events, self._to_front = events, to_front
        self.offer_again: Callable[[Sequence[int]], None] = lambda block_ids: None
        """Takes the blocks of a store that found no slots or has failed."""
        self.newest = self._last_before_reset = 0
        """The number of the newest store. Stores are numbered from 1."""
        self._asked: deque[_AskedStore] = deque()
        self._under_way: dict[int, int] = {}  # the number of each op, ascending
        self._pause = RetryPause()

    @property
    def are_awaited(self) -> bool:
        """Whether there are stores for which the pool has not found slots yet."""
        return bool(self._asked)

    def next_step(self) -> int:
        """Begin a step. Returns its `retry_room`."""
        self.take_granted()
        self._pause.step()
        return self.retry_room()

    def retry_room(self) -> int:
        """Free slots for blocks that were offered and not stored; 0 during a pause after failures."""
        return 0 if self._pause else self._control.store_room()

    def plan_store(self, offer: Offer, request_id: str = "") -> None:
        """Store the offered blocks, as far as there is room: in this step, or in the step after the pool has found
        slots for them. `offer_again` gets the other blocks."""
        if not offer.keys:
            return
        for first in range(0, len(offer.keys), MOST_STORED):
            end = first + MOST_STORED
            part = Offer(offer.keys[first:end], offer.blocks[first:end])
            answer = self._control.begin_store(part.keys, part.blocks, request_id=request_id)
            self.newest += 1
            if not answer.done:
                self._gpu.hold_sources(-self.newest, part.blocks)
            self._asked.append(_AskedStore(self.newest, part, answer))
        self.take_granted()

    def take_granted(self) -> None:
        """Plan the stores for which the pool has found slots since the last call. It answers in order."""
        while self._asked and self._asked[0].answer.done:
            number, offer, answer = self._asked.popleft()
            grant = answer.value
            described = self._events.granted(offer.keys, grant) if self._events is not None else ()
            if grant.op is not None:
                if described:
                    self._control.describe_store(grant.op, described)
                self._draft.stores.append(grant.op)
                self._gpu.hold_sources(grant.op.op_id, grant.op.blocks)
                self._under_way[grant.op.op_id] = number
            self._gpu.free_sources(-number, to_front=self._to_front)
            if grant.unplaced and number > self._last_before_reset:
                self.offer_again([offer.blocks[index] for index in grant.unplaced])

    def store_settled(self, settled: Settled) -> None:
        """Note that every rank has read the blocks of a store, or has finished it."""
        self._gpu.free_sources(settled.op_id, to_front=self._to_front)
        if settled.mark == "source_free":
            return
        number = self._under_way.pop(settled.op_id, 0)
        if settled.mark == "done":
            self._pause.succeeded()
        elif number > self._last_before_reset:
            self._pause.failed()
            self.offer_again(settled.blocks)

    def free_all_sources(self) -> None:
        """Release the GPU blocks of all stores, even those that ranks still read."""
        for hold in (*self._under_way, *[-asked.number for asked in self._asked]):
            self._gpu.free_sources(hold)

    def forget_stores(self) -> None:
        """Forget the stores under way: they belong to weights that were replaced, and are not stored again if they
        fail."""
        self._last_before_reset = self.newest


# -- what finds blocks -----------------------------------------------------------------------------------------


class _StepInPlan(NamedTuple):
    """The step that is being planned: its number, its requests, and the blocks of recurrent layers that it computes."""

    number: int = 0
    requests: Iterable[str] = ()
    states: Sequence[int] = ()


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
        # States are in no request's block table.
        self._groups = tuple([group for group in groups.groups if not group.is_state])
        self._alignment = groups.alignment
        self._gpu, self._stores, self._requests, self._events = gpu, stores, requests, events
        self._stride_blocks = sum(self._alignment // group.block_tokens for group in self._groups) or 1
        self._late_tokens = max((group.late_tokens for group in self._groups), default=0)
        self._step_blocks = self._left_for_ends = step_blocks
        self._due: dict[str, TrackedRequest] = {}
        self._backlog = Backlog(gpu)
        stores.offer_again = self._backlog.add_blocks
        self._planned = _StepInPlan()
        self._written_blocks: set[int] | None = set()

    @property
    def has_backlog(self) -> bool:
        """Whether blocks wait that were offered and not stored, or whose request has ended before they could be
        offered."""
        return bool(self._backlog)

    def forget_blocks(self) -> None:
        self._backlog.forget_backlog()

    def admitted(self, tracked: TrackedRequest) -> None:
        """Offer the request's complete blocks in later steps. Blocks that the GPU had cached are offered, too, because
        the pool may have lost them."""
        self._due[tracked.request.request_id] = tracked

    def offer_due(self, step: Any, number: int, states: Sequence[int], room: int) -> int:
        """Offer the blocks that older steps have completed for the requests that run in step `number`, and then the
        backlog, as far as the pool has `room`. `states`: blocks of recurrent layers that the step computes. Returns how
        many blocks were offered."""
        self._follow_tables(step.scheduled_cached_reqs, number)
        self._planned, self._written_blocks = _StepInPlan(number, step.num_scheduled_tokens, states), None
        offer, left = self._completed(step.num_scheduled_tokens)
        count = min(left, room - len(offer.keys))
        if self._backlog and count > 0:
            keys, blocks = self._backlog.take_cached(count, self._written)
            offer.keys.extend(keys)
            offer.blocks.extend(blocks)
        self._left_for_ends = self._step_blocks
        self._written_blocks = set()  # until the next step is planned
        self._stores.plan_store(offer)
        self._backlog.release_taken()
        return len(offer.keys)

    @property
    def _written(self) -> set[int]:
        """The GPU blocks that the step being planned writes. Its stores begin before it computes, so they must not read
        them. Computed at the first use, in O(scheduled requests): most steps do not need it.

        When vLLM plans the step that completes a block, it already names the block by the hash of its future content.
        The hash therefore proves nothing about a block that this step writes, whether the block was allocated in this
        step or in an older one.
        """
        if self._written_blocks is None:
            found = set(self._planned.states)
            for request_id in self._planned.requests:
                if (tracked := self._requests.get(request_id)) is not None:
                    first = max(0, tracked.confirmed_tokens)
                    # Another child of MultiConnector may load within this step.
                    if tracked.admitted_at == self._planned.number:
                        first = min(first, tracked.load.start)
                    for group in self._groups:
                        found.update(tracked.tables[group.index][first // group.block_tokens :])
            self._written_blocks = found
        return self._written_blocks

    def offer_last(self, tracked: TrackedRequest, tables: Sequence[Sequence[int]], *, again: bool = False) -> None:
        """Offer the complete blocks of a request that ends, which are in `tables`. The request still references them.
        Blocks beyond the limit of one step go to the backlog, which keeps them for a while. With `again`, all of its
        blocks are offered, because the pool lacks some that it had, or that it refused before.

        vLLM has removed from `tables` the blocks that left a window in the request's last step, although it still
        caches them. For a group with a window, this method therefore uses the blocks that the request was given.
        """
        self._due.pop(tracked.request.request_id, None)
        if self._events is not None:
            self._events.known.follow(tracked)
        for group in self._groups:
            if group.is_full:
                tracked.tables[group.index] = list(tables[group.index])
        if again:
            tracked.offered_tokens, tracked.load.tokens = 0, range(0)
        offer = Offer([], [])
        if self._left_for_ends > 0:
            self._left_for_ends -= self._take_next(tracked, self._left_for_ends, offer)
        self._backlog.add_blocks(self._take_rest(tracked), keep=True)
        self._stores.plan_store(offer, tracked.request.request_id)

    def preempted(self, tracked: TrackedRequest) -> None:
        """Put the blocks of a preempted request, of which the pool lacks some, into the backlog. They stay on the GPU
        until it needs their room."""
        if tracked.has_run:
            end, groups = tracked.offered_tokens, self._groups
            self._backlog.add_blocks(
                in_token_order([(group, tracked.tables[group.index][: end // group.block_tokens]) for group in groups])
            )

    def _follow_tables(self, running: Any, number: int) -> None:
        """Add the GPU blocks that running requests have got for the tokens of the step that is being planned."""
        for request_id, new_blocks in zip(running.req_ids, running.new_block_ids, strict=True):
            if new_blocks is None:
                continue
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.admitted_at == number:  # its admission gave the whole table
                continue
            for table, blocks in zip(tracked.tables, new_blocks, strict=True):
                table.extend(blocks)
            self._due[request_id] = tracked

    def _completed(self, scheduled: Container[str]) -> tuple[Offer, int]:
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
            left -= self._take_next(tracked, left, offer)
            del self._due[request_id]
            if self._expects_more(tracked):
                self._due[request_id] = tracked  # behind the others, which come first in the next step
        return offer, left

    def _complete_tokens(self, tracked: TrackedRequest) -> int:
        """The number of tokens up to which the request's blocks can be stored, in whole strides of `alignment`, where
        hits end. vLLM caches the blocks of a group with a window no earlier."""
        if tracked.withheld or not tracked.has_keys or not tracked.may_store:
            return 0
        end, num_hashes = tracked.confirmed_tokens - self._late_tokens, len(tracked.request.block_hashes)
        for group in self._groups:
            blocks = min(len(tracked.tables[group.index]), num_hashes // group.hashes_per_block)
            end = min(end, blocks * group.block_tokens)
        return end // self._alignment * self._alignment

    def _expects_more(self, tracked: TrackedRequest) -> bool:
        """Whether there are complete blocks, or may be before the request gets another block, because it already has
        the next one."""
        stride_end = tracked.offered_tokens + self._alignment
        if any(len(tracked.tables[group.index]) * group.block_tokens > stride_end for group in self._groups):
            return True
        return self._complete_tokens(tracked) >= stride_end

    def _take_next(self, tracked: TrackedRequest, most: int, offer: Offer) -> int:
        """Add about `most` of the request's next complete blocks to the offer. Returns how many blocks were visited."""
        if tracked.adapter is not None:
            tracked.adapter.check()
        alignment, start = self._alignment, tracked.offered_tokens
        strides = min((self._complete_tokens(tracked) - start) // alignment, max(1, most // self._stride_blocks))
        if strides <= 0:
            return 0
        tracked.offered_tokens = end = start + strides * alignment
        if self._events is not None:
            self._events.known.follow(tracked, end)
        found = Offer([], [])
        ends: list[int] = []  # of the blocks found, in tokens
        for group in self._groups:
            first, last = start // group.block_tokens, end // group.block_tokens
            loaded = range(0)
            if tokens := tracked.load.tokens:
                loaded = range(tokens.start // group.block_tokens, -(-tokens.stop // group.block_tokens))
            for numbers in (range(first, min(last, loaded.start)), range(max(first, loaded.stop), last)):
                if numbers:
                    self._find(tracked, group, numbers, found, ends)
        if len(self._groups) > 1:  # as in `KVGroups.places`: the end of a prefix is evicted before its beginning
            order = sorted(range(len(ends)), key=ends.__getitem__)
            found = Offer([found.keys[at] for at in order], [found.blocks[at] for at in order])
        offer.keys.extend(found.keys)
        offer.blocks.extend(found.blocks)
        return strides * self._stride_blocks

    def _find(self, tracked: TrackedRequest, group: KVGroup, numbers: range, found: Offer, ends: list[int]) -> None:
        keys = tracked.keys(group, numbers.start, numbers.stop)
        blocks = tracked.tables[group.index][numbers.start : numbers.stop]
        if not group.is_full:
            pairs = zip(keys, blocks, numbers, strict=True)
            there = [pair for pair in pairs if self._caches(pair[1], pair[0])]
            if there and (written := self._written.intersection([block for _, block, _ in there])):
                self._backlog.add_blocks([block for _, block, _ in there if block in written])
                there = [pair for pair in there if pair[1] not in written]
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


class LazyStores:
    """Finds the first `ahead_blocks` of the GPU's free queue, the next to be evicted, and stores them.

    Stored blocks return to their old place in the queue, so the GPU's order of eviction does not change. Only those
    first blocks are ever stored. A step reads the queue, at 60 ns a block, in three cases: its head has changed since
    the last read, fewer blocks were free then, or blocks wait that were not stored. A step offers at most
    `step_blocks`. Used by the scheduler's thread.
    """

    def __init__(
        self,
        control: ControlPlane,
        gpu: GPUBlocks,
        stores: Stores,
        events: EventFeed | None,
        ahead_blocks: int,
        step_blocks: int,
    ) -> None:
        self._control, self._gpu, self._stores, self._events = control, gpu, stores, events
        self._ahead_blocks, self._step_blocks = ahead_blocks, step_blocks
        self._head: Any = None
        self._offered: dict[int, bytes] = {}  # by block: the content that was offered
        self._not_stored: dict[int, bytes] = {}  # the same, for blocks that the pool did not take
        stores.offer_again = self._offer_again

    @property
    def has_backlog(self) -> bool:
        return bool(self._not_stored)

    def admitted(self, tracked: TrackedRequest) -> None:
        """Lazy stores use no block tables. The request counts as one that has run."""
        tracked.has_run = True

    def offer_due(self, step: Any, number: int, states: Sequence[int], room: int) -> int:
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

    def offer_last(self, tracked: TrackedRequest, tables: Sequence[Sequence[int]], *, again: bool = False) -> None:
        """Only for KV events: the blocks of an ended request join the free queue."""
        if self._events is not None:
            self._events.known.keep(tracked)

    def preempted(self, tracked: TrackedRequest) -> None:
        """As in `offer_last`: these blocks join the free queue, too."""
        self.offer_last(tracked, ())

    def _offer_again(self, block_ids: Sequence[int]) -> None:
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
            known = self._offered.get(block_id), self._not_stored.get(block_id)
            if content is not None and content not in known and not self._gpu.is_unstored(content):
                self._offered[block_id] = content
                hashes.append(content)
                blocks.append(block_id)
            block = block.next_free_block
        return self._gpu.offer_of(hashes, blocks)

    def _missing(self, found: Offer) -> Offer:
        there = self._control.contains(found.keys) if found.keys else ()
        if self._events is not None and any(there):
            self._events.found([key for key, is_there in zip(found.keys, there, strict=True) if is_there])
        kept = [pair for pair, is_there in zip(zip(*found, strict=True), there, strict=True) if not is_there]
        return Offer([key for key, _ in kept], [block for _, block in kept])


StoreFinder = EagerStores | LazyStores


class RecurrentStates:
    """Stores the states that vLLM hands over at block boundaries (vLLM 0.30, `mamba_cache_mode` "align").

    vLLM hands a state over with the step that computes it, so the state is read one step later. It is referenced until
    then. A request's block table does not contain states: their blocks are taken as they are handed over, under the
    hash by which vLLM caches them. Used by the scheduler's thread.
    """

    def __init__(self, gpu: GPUBlocks, stores: Stores) -> None:
        self._gpu, self._stores = gpu, stores
        self._waiting: list[tuple[Any, bytes]] = []  # blocks, and their hashes when they were handed over

    @property
    def are_waiting(self) -> bool:
        return bool(self._waiting)

    def blocks_computed(self, step: Any) -> list[int]:
        return [block_id for states in _handed_over(step).values() for _, block_id, _ in states]

    def follow_step(self, step: Any) -> None:
        """Store the states that the previous step handed over, as far as vLLM still caches them. Then take over the
        states of this step."""
        waiting, self._waiting = self._waiting, []
        cached = [(block, block_hash) for block, block_hash in waiting if block.block_hash == block_hash]
        hashes = [block_hash for _, block_hash in cached]
        self._stores.plan_store(self._gpu.offer_of(hashes, [block.block_id for block, _ in cached]))
        self._gpu.pool.free_blocks([block for block, _ in waiting])  # those being stored have their own references
        if not self._gpu.hash_bytes:
            return
        states = _handed_over(step)  # blocks of requests that have ended may belong to other requests by now
        gone = {*(step.preempted_req_ids or ()), *step.finished_req_ids} if states else ()
        blocks = [
            self._gpu.pool.blocks[block_id]
            for request_id, entries in states.items()
            if request_id not in gone
            for _, block_id, _ in entries
        ]
        kept = [
            block
            for block in blocks
            if not block.is_null and block.block_hash is not None and not self._gpu.is_unstored(block.block_hash)
        ]
        self._gpu.pool.touch(kept)
        self._waiting += [(block, block.block_hash) for block in kept]

    def forget_states(self) -> None:
        """Forget the waiting states: they belong to weights that were replaced."""
        waiting, self._waiting = self._waiting, []
        self._gpu.pool.free_blocks([block for block, _ in waiting])


def _handed_over(step: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """The (group, block, tokens) of each request's states."""
    handed_over = getattr(step, "kv_connector_block_state", None)
    return {} if handed_over is None else handed_over.boundary_state_offloads
