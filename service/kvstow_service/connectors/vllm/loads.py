"""Loads: how many of a request's tokens the pool has, and the copies into the GPU blocks that the request is given."""

from __future__ import annotations

import logging
import time
from itertools import accumulate

from kvstow.control.engine import OffloadEngine
from kvstow.errors import LeaseError
from kvstow.messages import Op
from kvstow_service.connectors.vllm.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.vllm.offloadmetrics import Observe
from kvstow_service.connectors.vllm.stepplan import StepPlanner
from kvstow_service.connectors.vllm.trackedrequests import Hit, TrackedRequest

logger = logging.getLogger("kvstow.vllm")


class Loads:
    """Looks requests up, holds what it finds, plans loads and follows them. Used by the scheduler's thread.

    A request may be asked for many times before it is admitted, with a local prefix that changes. Its hit is kept as
    long as it fits, so asking again costs O(1), and nothing is held twice. A group that attends to everything needs all
    blocks of the hit; a group with a window needs those that the next token reads. Blocks below the local prefix are on
    the GPU already.

    vLLM waits for a promised load until every rank has reported its end, so each `plan_load` ends in exactly one report
    per rank: of its op, or of its loss.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        planner: StepPlanner,
        groups: KVGroups,
        null_block: int,
        observe: Observe,
    ) -> None:
        """`null_block`: what stands in a block table for blocks out of the window. `observe` takes the time of each
        lookup."""
        self._engine, self._planner, self._groups = engine, planner, groups
        self._null_block, self._observe = null_block, observe
        self._full, self._partial = groups.full, groups.partial
        self._under_way: dict[int, TrackedRequest] = {}  # by op

    @property
    def are_under_way(self) -> bool:
        return bool(self._under_way)

    # -- lookup --------------------------------------------------------------------------------------------

    def hold_hit(self, tracked: TrackedRequest, local: int) -> int:
        """Tokens beyond the first `local` that can be loaded; they are held for the request. A hit without blocks to
        load, as at the start of a chunk, is none: vLLM waits for the end of each load."""
        tracked.start = local
        hit, end = tracked.hit, self._longest_end(tracked)
        can_load = local % self._groups.alignment == 0 and local < end
        if hit is None or not can_load or not hit.start <= local < hit.end:
            self.release_hit(tracked)
            tracked.hit = hit = self._look_up(tracked, local, end) if can_load else None
        return hit.end - local if hit is not None else 0

    def count_hit(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """The request is admitted, and goes on with `num_tokens` of what was found."""
        queried = self._longest_end(tracked) - tracked.start
        if queried > 0:
            alignment = self._groups.alignment
            self._engine.count_lookup(queried // alignment, num_tokens // alignment)

    def release_hit(self, tracked: TrackedRequest) -> None:
        """Hold nothing for the request any more."""
        if tracked.hit is not None:
            self._engine.release_lease(tracked.hit.lease)
            tracked.hit = None

    def _longest_end(self, tracked: TrackedRequest) -> int:
        """Where the longest hit beyond `tracked.start` would end.

        The last token is always computed. Where the hit is all of the prompt, vLLM computes that token again: a step of
        one token decodes, which is faster than computing its block (27 ms, not 37: H200, 8b of `bench.vllm`). No block
        is loaded for that alone. Where windows count, that token may read a block more, so the hit ends before it.
        """
        num_tokens, alignment = tracked.request.num_tokens, self._groups.alignment
        end = (num_tokens - 1) // alignment * alignment
        if self._groups.is_plain and num_tokens % alignment == 0 and end > tracked.start:
            return num_tokens
        return end

    def _look_up(self, tracked: TrackedRequest, local: int, end: int) -> Hit | None:
        begun = time.perf_counter()
        tracked.forget_stale_keys(self._groups)
        hit = self._find_hit(tracked, local, end)
        self._observe("lookup_sync_delay_seconds", time.perf_counter() - begun)
        return hit

    def _find_hit(self, tracked: TrackedRequest, local: int, end: int) -> Hit | None:
        if self._groups.is_plain:
            return self._hold_run(tracked, self._full[0], local, end)
        for group in self._full:
            keys = tracked.keys(group, local // group.block_tokens, end // group.block_tokens)
            end = min(end, local + self._engine.lookup(keys) * group.block_tokens)
        alignment = self._groups.alignment
        end = self._end_that_windows_allow(tracked, local, end // alignment * alignment)
        if end <= local:
            return None
        known = {group.index: tracked.keys(group, 0, end // group.block_tokens) for group in self._groups.groups}
        keys = [known[group][number] for group, number in self._groups.places(local, end)]
        lease = self._engine.lease(keys) if keys else None  # None: a block went away meanwhile
        return None if lease is None else Hit(local, end, lease)

    def _hold_run(self, tracked: TrackedRequest, group: KVGroup, local: int, end: int) -> Hit | None:
        """Find and hold in one step, where only the leading run counts."""
        lease = self._engine.acquire(
            tracked.keys(group, local // group.block_tokens, end // group.block_tokens), count=False
        )
        return Hit(local, local + len(lease.slots) * group.block_tokens, lease) if lease.slots else None

    def _end_that_windows_allow(self, tracked: TrackedRequest, local: int, end: int) -> int:
        """The last aligned token up to `end` at which each group with a window finds all that it needs."""
        absent = [self._absent(tracked, group, local, end) for group in self._partial]
        pairs = list(zip(self._partial, absent, strict=True))
        while end > local and not all(_is_whole(group, counts, local, end) for group, counts in pairs):
            end -= self._groups.alignment
        return end

    def _absent(self, tracked: TrackedRequest, group: KVGroup, local: int, end: int) -> list[int]:
        """Blocks missing between the local prefix and each block: `[j]` counts the first `j`."""
        keys = tracked.keys(group, local // group.block_tokens, end // group.block_tokens)
        return list(accumulate((not there for there in self._engine.contains(keys)), initial=0))

    # -- load -----------------------------------------------------------------------------------------------

    def plan_load(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Load the `num_tokens` tokens after `tracked.start` into its tables. Uses the hit up."""
        hit, tracked.hit = tracked.hit, None
        tracked.load_failed = False
        end = tracked.start + num_tokens
        places = self._groups.places(tracked.start, end)
        targets = [tracked.tables[group][number] for group, number in places]
        op = None if hit is None else self._load_hit(tracked, hit, end, places, targets)
        if op is None:
            self.lose_load(tracked, num_tokens)
        else:
            self._under_way[op.op_id] = tracked

    def lose_load(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """The load of the `num_tokens` tokens after `tracked.start` is impossible."""
        places = self._groups.places(tracked.start, tracked.start + num_tokens)
        tracked.load_failed = True
        blocks = tuple([tracked.tables[group][number] for group, number in places])
        self._planner.add_lost_load(tracked.request.request_id, blocks)

    def load_settled(self, op_id: int, *, failed: bool) -> None:
        """A load has ended on every rank."""
        tracked = self._under_way.pop(op_id, None)
        if tracked is not None:
            tracked.load_failed = failed

    def _load_hit(
        self, tracked: TrackedRequest, hit: Hit, end: int, places: list[tuple[int, int]], targets: list[int]
    ) -> Op | None:
        """None if not all that the request needs can be loaded; nothing is held then."""
        held, request_id = places, tracked.request.request_id
        if (tracked.start, end) != (hit.start, hit.end):
            held = self._groups.places(hit.start, hit.end)
        first = held.index(places[0]) if places and places[0] in held else len(held)
        try:
            if held[first : first + len(places)] == places and self._null_block not in targets:
                return self._planner.add_load(hit.lease, targets, first, request_id)
        except LeaseError as error:  # a rank has lost its memory since the lookup
            logger.warning("request %s is computed, its hit is lost: %s", request_id, error)
        self._engine.release_lease(hit.lease)
        return None


def _is_whole(group: KVGroup, absent: list[int], local: int, end: int) -> bool:
    """Whether the group finds all that the token after `end` reads, in `absent` of `_absent`."""
    base = local // group.block_tokens
    first, last = max(group.first_block(end) - base, 0), end // group.block_tokens - base
    return last < len(absent) and absent[first] == absent[last]
