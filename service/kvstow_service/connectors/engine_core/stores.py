"""Stores: from the offer of GPU blocks to the end of the copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvstow.results import Awaited, Settled, StoreGrant
from kvstow_service.connectors.engine_core.backlog import RetryPause
from kvstow_service.connectors.engine_core.controlplane import ControlPlane
from kvstow_service.connectors.engine_core.gpublocks import GPUBlocks, Offer, WrittenBlocks
from kvstow_service.connectors.engine_core.kvevents import EventFeed, Origins
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.stepplan import Step, StepPlanner
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

_NO_STORE = 1 << 63  # a number above that of every store
_MOST_LEAVING = 64  # requests that wait for the backlog


class StoreFinder(Protocol):
    """Finds the GPU blocks that are worth storing, and offers them to `Stores`."""

    @property
    def has_backlog(self) -> bool:
        """Whether blocks wait that only the finder knows about: they were offered and not stored, or their request has
        ended before they could be offered."""

    def admitted(self, tracked: TrackedRequest) -> None:
        """The request has its tables."""

    def offer_due(self, step: Step, number: int, written: WrittenBlocks, room: int) -> int:
        """Offer what is due in step `number`, with at most `room` blocks of the backlog. Returns how many blocks were
        offered."""

    def offer_last(self, tracked: TrackedRequest, tables: Sequence[Sequence[int]]) -> None:
        """Offer what is complete at the end of a request that has run."""

    def offer_again(self, block_ids: Sequence[int]) -> None:
        """Take back blocks that were offered and not stored. They join the backlog."""

    def forget_blocks(self) -> None:
        """The pool was emptied."""


class _AskedStore(NamedTuple):
    """Store `number`, for which the pool has not found slots yet. `origins`: what its KV events will say."""

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
        planner: StepPlanner,
        gpu: GPUBlocks,
        events: EventFeed | None,
        *,
        to_front: bool,
    ) -> None:
        """`to_front`: blocks come from the head of the GPU's free queue, and return there."""
        self._control, self._planner, self._gpu = control, planner, gpu
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
        answer = self._planner.begin_store(offer.keys, offer.blocks, request_id)
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
                self._planner.add_store(grant.op)
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
    """A request whose last store is number `last_store` or an older one. Its blocks after `end` tokens are in order."""

    last_store: int
    tracked: TrackedRequest
    end: int


class EndedRequests:
    """Tells the pool which blocks the requests that have ended had used. Used by the scheduler's thread.

    That is once for each request, for its whole chain: what was found on the GPU, loaded, and computed. The chain was
    stored step by step, so the beginning of it would be evicted first. Once the last store is done, all its blocks are
    marked as used at that time, the beginning last.
    """

    def __init__(self, control: ControlPlane, groups: KVGroups, stores: Stores) -> None:
        self._control, self._groups, self._stores = control, groups, stores
        self._blocks_per_stride = sum(groups.alignment // group.block_tokens for group in groups.groups)
        self._leaving: list[_EndedRequest] = []  # the backlog may contain their blocks
        self._ended: deque[_EndedRequest] = deque()

    def add_ended(self, tracked: TrackedRequest) -> None:
        """A request that has run ends."""
        if not tracked.withheld:
            end = tracked.confirmed_tokens // self._groups.alignment * self._groups.alignment
            self._leaving.append(_EndedRequest(0, tracked, end))

    def tell_uses(self, most: int, *, backlog_moves: bool) -> None:
        """Tell of at most `most` blocks, starting at the ends of requests; one request may take several steps.
        `backlog_moves`: the backlog is about to be stored, and requests that have just ended wait for it."""
        if not backlog_moves or len(self._leaving) > _MOST_LEAVING:
            last = self._stores.newest
            self._ended += [each._replace(last_store=last) for each in self._leaving]
            self._leaving = []
        oldest, alignment = self._stores.oldest, self._groups.alignment
        while most > 0 and self._ended and self._ended[0].last_store < oldest:
            last_store, tracked, end = self._ended.popleft()
            start = max(0, end - max(1, most // self._blocks_per_stride) * alignment)
            keys = tracked.keys_between(self._groups, start, end)
            first, stop = self._position(tracked.looked_up.start), self._position(tracked.looked_up.stop)
            self._control.use(keys, start=self._position(start), looked_up=(first, stop))
            most -= len(keys)
            if start:
                self._ended.appendleft(_EndedRequest(last_store, tracked, start))

    def _position(self, num_tokens: int) -> int:
        """How many keys a chain has before the block that begins after so many tokens."""
        return num_tokens // self._groups.alignment * self._blocks_per_stride

    def forget_ended(self) -> None:
        self._leaving = []
        self._ended.clear()
