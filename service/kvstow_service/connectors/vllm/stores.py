"""Stores: from the GPU blocks that are offered to the end of the copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvstow.control.engine import OffloadEngine
from kvstow.results import Settled
from kvstow_service.connectors.vllm.backlog import RetryPause
from kvstow_service.connectors.vllm.gpublocks import GPUBlocks, Offer, WrittenBlocks
from kvstow_service.connectors.vllm.kvevents import EventFeed
from kvstow_service.connectors.vllm.kvgroups import KVGroups
from kvstow_service.connectors.vllm.stepplan import Step, StepPlanner
from kvstow_service.connectors.vllm.trackedrequests import TrackedRequest

_NO_STORE = 1 << 63  # later than all
_MOST_LEAVING = 64  # requests that wait for the backlog


class StoreFinder(Protocol):
    """Finds the GPU blocks that are worth storing, and offers them to `Stores`."""

    @property
    def has_backlog(self) -> bool:
        """Whether blocks wait that only the finder knows: they were offered and not stored, or their request has ended
        before they could be offered."""

    def admitted(self, tracked: TrackedRequest) -> None:
        """The request has its tables."""

    def offer_due(self, step: Step, number: int, written: WrittenBlocks, room: int) -> int:
        """Offer what is due in this step, the `number`-th, and no more than `room` blocks of the backlog. Returns how
        many blocks were offered."""

    def offer_last(self, tracked: TrackedRequest, tables: Sequence[Sequence[int]]) -> None:
        """Offer what is complete at the end of a request that has run."""

    def offer_again(self, block_ids: Sequence[int]) -> None:
        """These blocks were offered and not stored: they join the backlog."""

    def forget_blocks(self) -> None:
        """The pool was emptied."""


class Stores:
    """Plans stores and follows them to their end. Used by the scheduler's thread."""

    def __init__(
        self, engine: OffloadEngine, planner: StepPlanner, gpu: GPUBlocks, events: EventFeed | None, *, to_front: bool
    ) -> None:
        """`to_front`: blocks come from the head of the GPU's free queue, and return there."""
        self._engine, self._planner, self._gpu = engine, planner, gpu
        self._events, self._to_front = events, to_front
        self._under_way: dict[int, None] = {}  # ops, ascending
        self._last_before_reset = 0
        self._pause = RetryPause()

    @property
    def oldest(self) -> int:
        """The oldest op under way, or a number above all ops."""
        return next(iter(self._under_way), _NO_STORE)

    @property
    def newest(self) -> int:
        """The newest op under way, or 0."""
        return next(reversed(self._under_way), 0)

    def next_step(self) -> int:
        """A step begins; its `retry_room`."""
        self._pause.step()
        return self.retry_room()

    def retry_room(self) -> int:
        """Free slots for blocks that were offered and not stored; 0 during a pause after failures."""
        return 0 if self._pause else self._engine.store_room()

    def plan_store(self, offer: Offer, request_id: str = "") -> list[int]:
        """Store the blocks offered, as far as there is room; the blocks that found none."""
        if not offer.keys:
            return []
        grant = self._planner.add_store(offer.keys, offer.blocks, request_id)
        if self._events is not None:
            self._events.granted([offer.keys[index] for index in grant.accepted])
        if grant.op is not None:
            self._gpu.hold_sources(grant.op.op_id, grant.op.blocks)
            self._under_way[grant.op.op_id] = None
        return [offer.blocks[index] for index in grant.unplaced]

    def store_settled(self, settled: Settled) -> Sequence[int]:
        """Every rank has read the blocks of a store, or has finished it; the blocks to offer again."""
        self._gpu.free_sources(settled.op_id, to_front=self._to_front)
        if settled.mark == "source_free":
            return ()
        self._under_way.pop(settled.op_id, None)
        if settled.mark == "done":
            self._pause.succeeded()
        elif settled.op_id > self._last_before_reset:
            self._pause.failed()
            return settled.blocks
        return ()

    def free_all_sources(self) -> None:
        """Give the GPU blocks of all stores back, also of those that ranks still read."""
        for op_id in self._under_way:
            self._gpu.free_sources(op_id)

    def forget_stores(self) -> None:
        """What is under way belongs to weights that were replaced: it is not stored again if it fails."""
        self._last_before_reset = self.newest or self._last_before_reset


class _EndedRequest(NamedTuple):
    """A request whose last store is op `last_store` or older. Its blocks after `end` tokens are in order."""

    last_store: int
    tracked: TrackedRequest
    end: int


class EndedRequests:
    """Puts the blocks of ended requests into the pool's order of eviction. Used by the scheduler's thread.

    The steps of a request were stored one after the other, so the beginning of its prefix would be evicted first. Once
    its last store is done, all its blocks are marked as used at that time, the beginning last.
    """

    def __init__(self, engine: OffloadEngine, groups: KVGroups, stores: Stores) -> None:
        self._engine, self._groups, self._stores = engine, groups, stores
        self._blocks_per_stride = sum(groups.alignment // group.block_tokens for group in groups.groups)
        self._leaving: list[TrackedRequest] = []  # the backlog may have blocks of theirs
        self._ended: deque[_EndedRequest] = deque()

    def add_ended(self, tracked: TrackedRequest) -> None:
        self._leaving.append(tracked)

    def refresh(self, most: int, *, backlog_moves: bool) -> None:
        """Mark at most `most` blocks as used, from the ends of requests on, so that it may take several steps.
        `backlog_moves`: the backlog is about to be stored, and requests that have just ended wait for it."""
        if not backlog_moves or len(self._leaving) > _MOST_LEAVING:
            last = self._stores.newest
            self._ended += [_EndedRequest(last, tracked, tracked.offered_tokens) for tracked in self._leaving]
            self._leaving = []
        oldest, alignment = self._stores.oldest, self._groups.alignment
        while most > 0 and self._ended and self._ended[0].last_store < oldest:
            last_store, tracked, end = self._ended.popleft()
            start = max(0, end - max(1, most // self._blocks_per_stride) * alignment)
            keys = tracked.keys_between(self._groups, start, end)
            self._engine.refresh(keys)
            most -= len(keys)
            if start:
                self._ended.appendleft(_EndedRequest(last_store, tracked, start))

    def forget_ended(self) -> None:
        self._leaving = []
        self._ended.clear()
