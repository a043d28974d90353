"""Hits: how far the pool can carry a request on, and the leases that keep those blocks meanwhile."""

from __future__ import annotations

import time
from itertools import accumulate

from kvstow.control.engine import OffloadEngine
from kvstow_service.connectors.vllm.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.vllm.offloadmetrics import Observe
from kvstow_service.connectors.vllm.trackedrequests import Hit, TrackedRequest


class HitFinder:
    """Looks requests up in the pool.

    A request may be asked for many times before it is admitted, with a local prefix that changes. What it holds is
    kept as long as it serves, so that asking again costs O(1), and is never held twice.

    A group that attends to everything needs all blocks of the hit; one with a window needs those that the next token
    reads. Blocks below the local prefix are on the GPU already.
    """

    def __init__(self, engine: OffloadEngine, groups: KVGroups, observe: Observe | None = None) -> None:
        """`observe` takes the time of each look-up."""
        self._engine, self._groups, self._observe = engine, groups, observe
        self._full, self._partial = groups.full, groups.partial

    def find(self, tracked: TrackedRequest, local: int) -> int:
        """Tokens beyond the first `local` that can be loaded; they are held for the request then. None where there is
        nothing to load, as at the start of a chunk: vLLM waits for the end of each load."""
        tracked.start = local
        hit, end = tracked.hit, self._end(tracked)
        if hit is None or local % self._groups.alignment or not hit.start <= local < min(hit.end, end):
            self.release(tracked)
            begun = time.perf_counter()
            tracked.hit = hit = self._look_up(tracked, local, end)
            if self._observe is not None:
                self._observe("lookup_sync_delay_seconds", time.perf_counter() - begun)
        return hit.end - local if hit is not None else 0

    def count(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """The request is admitted, and goes on with `num_tokens` of what was found."""
        queried = self._end(tracked) - tracked.start
        if queried > 0:
            alignment = self._groups.alignment
            self._engine.count_lookup(queried // alignment, num_tokens // alignment)

    def release(self, tracked: TrackedRequest) -> None:
        """Hold nothing for the request any more."""
        if tracked.hit is not None:
            self._engine.release(tracked.hit.lease)
            tracked.hit = None

    def _end(self, tracked: TrackedRequest) -> int:
        """Where the longest hit beyond `tracked.start` would end.

        The last token is always computed. Where the hit is all of the prompt, vLLM computes that token anew: a step of
        one token decodes, which is faster than computing its block (27 ms, not 37: H200, 8b of `bench.vllm`). For that
        alone no block is loaded. Where windows count, that token may read a block more, so the hit ends before it.
        """
        num_tokens, alignment = tracked.request.num_tokens, self._groups.alignment
        end = (num_tokens - 1) // alignment * alignment
        if self._groups.is_plain and num_tokens % alignment == 0 and end > tracked.start:
            return num_tokens
        return end

    def _look_up(self, tracked: TrackedRequest, local: int, end: int) -> Hit | None:
        alignment = self._groups.alignment
        if local % alignment or end <= local:
            return None
        tracked.forget_stale_keys(self._groups)
        if self._groups.is_plain:
            return self._take_run(tracked, self._full[0], local, end)
        for group in self._full:
            keys = tracked.keys(group, local // group.block_tokens, end // group.block_tokens)
            end = min(end, local + self._engine.lookup(keys) * group.block_tokens)
        end = self._carried_by_windows(tracked, local, end // alignment * alignment)
        if end <= local:
            return None
        known = {group.index: tracked.keys(group, 0, end // group.block_tokens) for group in self._groups.groups}
        keys = [known[group][number] for group, number in self._groups.places(local, end)]
        lease = self._engine.lease(keys) if keys else None  # None: a block went away meanwhile
        return None if lease is None else Hit(local, end, lease)

    def _take_run(self, tracked: TrackedRequest, group: KVGroup, local: int, end: int) -> Hit | None:
        """Find and hold in one step, where nothing but the leading run counts."""
        lease = self._engine.acquire(
            tracked.keys(group, local // group.block_tokens, end // group.block_tokens), count=False
        )
        return Hit(local, local + len(lease.slots) * group.block_tokens, lease) if lease.slots else None

    def _carried_by_windows(self, tracked: TrackedRequest, local: int, end: int) -> int:
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


def _is_whole(group: KVGroup, absent: list[int], local: int, end: int) -> bool:
    """Whether the group finds all that the token after `end` reads, in `absent` of `_absent`."""
    base = local // group.block_tokens
    first, last = max(group.first_block(end) - base, 0), end // group.block_tokens - base
    return last < len(absent) and absent[first] == absent[last]
