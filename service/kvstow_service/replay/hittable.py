"""What a trace hits by size and policy: real control planes without ranks, in the time of the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.hints import Hints
from kvstow.keys import BlockKey
from kvstow.messages import Completion, RankReport
from kvstow_service.replay.trace import TraceRequest

FORESIGHT = "min"
"""In place of a policy: the block is evicted that is used again last, or never."""
_SLOT_BYTES = 64
_BOOT = "simulated"
_TICK = 1e-6
"""Seconds between two requests that a trace has at the same time: otherwise chance decides which is the older."""
_TOLD = 64  # requests from one call of `on_requests` to the next


class TimedPool:
    """A control plane whose clock is that of a trace, and whose copies are done at once."""

    def __init__(self, slots: int, policy: str) -> None:
        self.now = 0.0
        config = EngineConfig(slot_bytes=_SLOT_BYTES, capacity_slots=slots, policy=policy, curve=False)
        self.engine = OffloadEngine(config, clock=lambda: self.now)
        no_pool = RankReport.without_pool(0, _BOOT, "ready", _SLOT_BYTES)
        self.engine.report(replace(no_pool, pinned_slots=slots, target_slots=slots, number=1))

    def serve(
        self,
        keys: Sequence[BlockKey],
        now: float,
        asked: tuple[int, int] | None = None,
        hints: Hints | None = None,
    ) -> int:
        """Returns the leading blocks that were found. `asked`: from where to where it looks blocks up; it stores those
        behind what it has found."""
        self.now = max(now, self.now + _TICK)
        engine = self.engine
        first, stop = asked or (0, len(keys))
        lease = engine.acquire(keys[first:stop])
        found = len(lease.slots)
        rest = keys[first + found :]
        if rest:
            op = engine.begin_store(rest, range(len(rest))).op
            if op is not None:
                engine.complete(0, _BOOT, [Completion(op.op_id, "done", None, _SLOT_BYTES, 0.001)])
            engine.take_settled()
        engine.release_lease(lease)
        engine.use(keys, looked_up=(first, stop), hints=hints)
        return found


def foresight_hits(
    requests: Sequence[Sequence[int]], slots: float, asked: Sequence[tuple[int, int]] | None = None
) -> int:
    """Blocks that hit with perfect foresight; `slots` may be infinite. `asked`: see `TimedPool.serve`."""
    upcoming: dict[int, list[int]] = {}
    for number in range(len(requests) - 1, -1, -1):
        for block in requests[number]:
            upcoming.setdefault(block, []).append(number)
    next_use: dict[int, float] = {}
    heap: list[tuple[float, int, int]] = []
    hits = 0
    for number, request in enumerate(requests):
        first, stop = asked[number] if asked is not None else (0, len(request))
        hits += next((at for at in range(first, stop) if request[at] not in next_use), stop) - first
        for depth, block in enumerate(request):
            uses = upcoming[block]
            uses.pop()
            next_use[block] = uses[-1] if uses else inf
            heappush(heap, (-next_use[block], -depth, block))
        while len(next_use) > slots:
            use, _, block = heappop(heap)
            if next_use.get(block) == -use:
                del next_use[block]
    return hits


class HitTable(NamedTuple):
    """How many of the `blocks` that were looked up hit, by policy, for each of the `sizes` in slots. `everything`: the
    share of them that a pool hits which never evicts."""

    sizes: tuple[int, ...]
    slot_bytes: int
    hits: dict[str, list[int]]
    everything: float
    requests: int
    blocks: int

    @property
    def ratios(self) -> dict[str, list[float]]:
        return {policy: [found / max(1, self.blocks) for found in hits] for policy, hits in self.hits.items()}

    def to_json(self) -> dict[str, Any]:
        ratios = self.ratios
        return {
            "requests": self.requests,
            "blocks": self.blocks,
            "everything": self.everything,
            "sizes": [
                {
                    "slots": slots,
                    "bytes": slots * self.slot_bytes,
                    "ratios": {policy: found[number] for policy, found in ratios.items()},
                }
                for number, slots in enumerate(self.sizes)
            ],
        }


def hit_table(
    requests: Sequence[TraceRequest],
    sizes: Sequence[int],
    policies: Sequence[str],
    slot_bytes: int,
    on_requests: Callable[[int], None] = lambda count: None,
) -> HitTable:
    """`on_requests` is called with how many requests of all pools together are done."""
    chains, asked = [request.keys() for request in requests], [request.asked for request in requests]
    ids = [request.hash_ids for request in requests]
    blocks = sum(stop - first for first, stop in asked)
    done = 0
    found: dict[str, list[int]] = {policy: [] for policy in policies}
    for slots in sizes:
        for policy in policies:
            if policy == FORESIGHT:
                hits = foresight_hits(ids, slots, asked)
            else:
                pool, hits = TimedPool(slots, policy), 0
                for number, (request, chain) in enumerate(zip(requests, chains, strict=True)):
                    hits += pool.serve(chain, request.timestamp / 1000, request.asked)
                    if number % _TOLD == 0:
                        on_requests(done + number)
            found[policy].append(hits)
            done += len(requests)
            on_requests(done)
    everything = foresight_hits(ids, inf, asked) / max(1, blocks)
    return HitTable(tuple(sizes), slot_bytes, found, everything, len(requests), blocks)
