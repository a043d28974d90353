"""Stores: from the offer of GPU blocks to the end of the copies.

The blocks of vLLM's GPU pool have keys of their contents and the references that keep them. The backlog has those that
still have to be stored."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

from kvstow.keys import make_key
from kvstow.results import Awaited, Settled, StoreGrant
from kvstow_service.connectors.engine_core.adapters import Adapter
from kvstow_service.connectors.engine_core.controlplane import ControlPlane
from kvstow_service.connectors.engine_core.hints import UnstoredHashes
from kvstow_service.connectors.engine_core.kvevents import EventFeed, Origins
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.stepplan import StepDraft
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
        self.unstored: UnstoredHashes | None = None
        """Set while requests come that are not to be stored."""
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

    def is_unstored(self, block_hash: bytes) -> bool:
        """Whether what vLLM caches under this hash was computed by a request that lets nothing be stored."""
        begin = -_GROUP_ID_BYTES - self.hash_bytes
        return self.unstored is not None and block_hash[begin:-_GROUP_ID_BYTES] in self.unstored

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


_LONGEST_PAUSE = 256


class Backlog:
    """GPU blocks whose store was refused, dropped or failed, or did not fit into a step. Used by one thread.

    Nothing holds these blocks: the GPU may evict one before it is offered. Each is offered under the hash by which vLLM
    caches it at that time, not the hash that it had when it was added. It is not offered if vLLM caches nothing in it.
    Each block waits at most once, so the backlog never holds more blocks than the GPU has.
    """

    def __init__(self, gpu: GPUBlocks) -> None:
        self._gpu = gpu
        self._queue: deque[int] = deque()
        self._queued: set[int] = set()

    def __len__(self) -> int:
        return len(self._queue)

    def add_blocks(self, block_ids: Iterable[int]) -> None:
        """Append these blocks. Blocks that already wait keep their place."""
        queued, new = self._queued, list(dict.fromkeys(block_ids))
        if queued:
            new = [block_id for block_id in new if block_id not in queued]
        queued.update(new)
        self._queue.extend(new)

    def take_cached(self, count: int, unwritten: Set[int]) -> Offer:
        """Offer the blocks that vLLM caches among the first `count`, and forget the other blocks of these. Blocks in
        `unwritten`, which the step being planned has yet to write, stay in the backlog. O(count)."""
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
            block_hash = gpu_blocks[block_id].block_hash
            if block_hash is not None and not self._gpu.is_unstored(block_hash):
                hashes.append(block_hash)
                blocks.append(block_id)
        queue.extend(waiting)
        return self._gpu.offer_of(hashes, blocks)

    def forget_backlog(self) -> None:
        self._queue.clear()
        self._queued.clear()


class RetryPause:
    """Steps to wait before blocks are offered again: none after the first failure, then 1, 2, 4 and so on up to 256."""

    def __init__(self) -> None:
        self._left = self._next = 0

    def __bool__(self) -> bool:
        """Whether the pause continues."""
        return self._left > 0

    def step(self) -> None:
        """A step begins."""
        self._left = max(0, self._left - 1)

    def failed(self) -> None:
        """A store has failed. Ignored during a pause, because that store was planned before the pause began."""
        if not self._left:
            self._left, self._next = self._next, min(max(1, 2 * self._next), _LONGEST_PAUSE)

    def succeeded(self) -> None:
        self._left = self._next = 0


_NO_STORE = 1 << 63  # a number above that of every store
_MOST_LEAVING = 64  # requests that wait for the backlog


class _AskedStore(NamedTuple):
    """Store `number`, for which the pool has not found slots yet. `origins`: what its KV events are made of."""

    number: int
    offer: Offer
    origins: Origins
    answer: Awaited[StoreGrant]


class Stores:
    """Plans stores and follows them to their end. Used by the scheduler's thread.

    The blocks of a store are referenced from the moment the store is asked for until every rank has read them.
    """

    def __init__(
        self,
        control: ControlPlane,
        draft: StepDraft,
        gpu: GPUBlocks,
        events: EventFeed | None,
        *,
        to_front: bool,
    ) -> None:
        """`to_front`: blocks come from the head of the GPU's free queue, and return there."""
        self._control, self._draft, self._gpu = control, draft, gpu
        self._events, self._to_front = events, to_front
        self.offer_again: Callable[[Sequence[int]], None] = lambda block_ids: None
        """Takes the blocks of a store for which there were no slots."""
        self._last = self._last_before_reset = 0
        self._asked: deque[_AskedStore] = deque()
        self._under_way: dict[int, int] = {}  # the number of each op, ascending
        self._pause = RetryPause()

    @property
    def are_awaited(self) -> bool:
        """Whether there are stores for which the pool has not found slots yet."""
        return bool(self._asked)

    @property
    def oldest(self) -> int:
        """The number of the oldest store that has not ended. If all have ended, a number above all of them."""
        asked = self._asked[0].number if self._asked else _NO_STORE
        return next(iter(self._under_way.values()), asked)

    @property
    def newest(self) -> int:
        """The number of the newest store. Stores are numbered from 1."""
        return self._last

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
        answer = self._control.begin_store(offer.keys, offer.blocks, request_id=request_id)
        self._last += 1
        if not answer.done:
            self._gpu.hold_sources(-self._last, offer.blocks)
        origins = self._events.take_offered() if self._events is not None else {}
        self._asked.append(_AskedStore(self._last, offer, origins, answer))
        self.take_granted()

    def take_granted(self) -> None:
        """Plan the stores for which the pool has found slots since the last call. It answers in order."""
        while self._asked and self._asked[0].answer.done:
            number, offer, origins, answer = self._asked.popleft()
            grant = answer.value
            if self._events is not None:
                self._events.granted([offer.keys[index] for index in grant.accepted], origins)
            if grant.op is not None:
                self._draft.stores.append(grant.op)
                self._gpu.hold_sources(grant.op.op_id, grant.op.blocks)
                self._under_way[grant.op.op_id] = number
            self._gpu.free_sources(-number, to_front=self._to_front)
            if grant.unplaced and number > self._last_before_reset:
                self.offer_again([offer.blocks[index] for index in grant.unplaced])

    def store_settled(self, settled: Settled) -> Sequence[int]:
        """Every rank has read the blocks of a store, or has finished it. Returns the blocks to offer again."""
        self._gpu.free_sources(settled.op_id, to_front=self._to_front)
        if settled.mark == "source_free":
            return ()
        number = self._under_way.pop(settled.op_id, 0)
        if settled.mark == "done":
            self._pause.succeeded()
        elif number > self._last_before_reset:
            self._pause.failed()
            return settled.blocks
        return ()

    def free_all_sources(self) -> None:
        """Release the GPU blocks of all stores, even those that ranks still read."""
        for hold in (*self._under_way, *[-asked.number for asked in self._asked]):
            self._gpu.free_sources(hold)

    def forget_stores(self) -> None:
        """Forget the stores under way: they belong to weights that were replaced, and are not stored again if they
        fail."""
        self._last_before_reset = self._last


class _EndedRequest(NamedTuple):
    """A request whose last store is number `last_store` or an older one, and that ended at the time `at`. Its blocks
    after `end` tokens are in order."""

    last_store: int
    tracked: TrackedRequest
    end: int
    at: float


class EndedRequests:
    """Reports to the pool which blocks the requests that have ended had used. Used by the scheduler's thread.

    That is once for each request, for its whole chain: what was found on the GPU, loaded, and computed. The chain was
    stored step by step, so the beginning of it would be evicted first. Once the last store is done, all its blocks are
    marked as used at that time, the beginning last.
    """

    def __init__(
        self, control: ControlPlane, groups: KVGroups, stores: Stores, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._control, self._groups, self._stores, self._clock = control, groups, stores, clock
        self._blocks_per_stride = sum(groups.alignment // group.block_tokens for group in groups.groups)
        self._leaving: list[_EndedRequest] = []  # the backlog may contain their blocks
        self._ended: deque[_EndedRequest] = deque()

    def add_ended(self, tracked: TrackedRequest) -> None:
        """A request that has run ends."""
        if not tracked.withheld:
            alignment, end = self._groups.alignment, tracked.confirmed_tokens
            if not tracked.may_store:  # the others were not stored, and no pool should have kept them
                end = min(end, tracked.computed_from)
            self._leaving.append(_EndedRequest(0, tracked, end // alignment * alignment, self._clock()))

    def report_uses(self, most: int, *, backlog_moves: bool) -> None:
        """Report at most `most` blocks, starting at the ends of requests; one request may take several steps.
        `backlog_moves`: the backlog is about to be stored, and requests that have just ended wait for it."""
        if not backlog_moves or len(self._leaving) > _MOST_LEAVING:
            last = self._stores.newest
            self._ended += [each._replace(last_store=last) for each in self._leaving]
            self._leaving = []
        oldest, alignment = self._stores.oldest, self._groups.alignment
        while most > 0 and self._ended and self._ended[0].last_store < oldest:
            last_store, tracked, end, at = self._ended.popleft()
            start = max(0, end - max(1, most // self._blocks_per_stride) * alignment)
            keys = tracked.keys_between(self._groups, start, end)
            first, stop = self._position(tracked.looked_up.start), self._position(tracked.looked_up.stop)
            hints = tracked.hints
            if hints is not None and hints.resume_in is not None:
                hints = replace(hints, resume_in=max(0.0, hints.resume_in - (self._clock() - at)))
            source = tracked.source(self._control.source_key)
            position = self._position(start)
            self._control.use(keys, start=position, looked_up=(first, stop), hints=hints, source=source)
            most -= len(keys)
            if start:
                self._ended.appendleft(_EndedRequest(last_store, tracked, start, at))

    def _position(self, num_tokens: int) -> int:
        """How many keys a chain has before the block that begins after so many tokens."""
        return num_tokens // self._groups.alignment * self._blocks_per_stride

    def forget_ended(self) -> None:
        self._leaving = []
        self._ended.clear()
