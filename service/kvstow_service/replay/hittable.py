"""What a trace hits by size and policy: real control planes without ranks, in the time of the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, NamedTuple

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.hints import Hints
from kvstow.keys import BlockKey
from kvstow.messages import Completion, RankReport
from kvstow_service.replay.trace import TraceRequest, events, key_of

FORESIGHT = "min"
"""In place of a policy: the block is evicted that is used again last, or never."""
_SLOT_BYTES = 64
_BOOT = "simulated"
_TICK = 1e-6
"""Seconds between two requests that a trace has at the same time: otherwise chance decides which is the older."""
_TOLD = 64  # requests from one call of `on_requests` to the next
_STALE = 1 << 16


class Admitted(NamedTuple):
    """A request that a pool has admitted. `asked`: from where to where it has looked its `keys` up; `found`: the
    leading ones of those that were there."""

    keys: Sequence[BlockKey]
    asked: tuple[int, int]
    found: int


class TimedPool:
    """A control plane whose clock is that of a trace, and whose copies are done at once.

    `admit` and `end` are all that it learns of a request, in this order and with other requests in between: what a
    connector tells its control plane at these two moments belongs there.
    """

    def __init__(self, slots: int, policy: str) -> None:
        self.now = 0.0
        config = EngineConfig(slot_bytes=_SLOT_BYTES, capacity_slots=slots, policy=policy, curve=False)
        self.engine = OffloadEngine(config, clock=lambda: self.now)
        no_pool = RankReport.without_pool(0, _BOOT, "ready", _SLOT_BYTES)
        self.engine.report(replace(no_pool, pinned_slots=slots, target_slots=slots, number=1))

    def admit(self, keys: Sequence[BlockKey], now: float, asked: tuple[int, int] | None = None) -> Admitted:
        """A request begins, in seconds. It looks up its blocks `asked`, None for all of them: the GPU has those before.
        It stores all that are behind those which it has found."""
        self._go_on(now)
        engine = self.engine
        first, stop = asked or (0, len(keys))
        lease = engine.acquire(keys[first:stop])
        found = len(lease.slots)
        rest = keys[first + found :]
        if rest:
            op = engine.begin_store(rest, range(len(rest))).op
            if op is not None:
                self._go_on(now)  # a store is done later than the look-up
                engine.complete(0, _BOOT, [Completion(op.op_id, "done", None, _SLOT_BYTES, 0.001)])
            engine.take_settled()
        engine.release_lease(lease)
        return Admitted(keys, (first, stop), found)

    def end(self, request: Admitted, now: float, stop: str | None = None, hints: Hints | None = None) -> None:
        """A request ends. `stop`: how, as in its trace; the control plane takes no account of it. `hints`: what its
        client says about the next request."""
        self._go_on(now)
        self.engine.use(request.keys, looked_up=request.asked, hints=hints)

    def serve(
        self,
        keys: Sequence[BlockKey],
        now: float,
        asked: tuple[int, int] | None = None,
        hints: Hints | None = None,
    ) -> int:
        """A request that ends as soon as it begins. Returns the leading blocks that were found."""
        request = self.admit(keys, now, asked)
        self.engine.use(request.keys, looked_up=request.asked, hints=hints)
        return request.found

    def _go_on(self, now: float) -> None:
        self.now = max(now, self.now + _TICK)


class KeyTable(dict[int, BlockKey]):
    """The key of each block id, made once."""

    def __missing__(self, hash_id: int) -> BlockKey:
        return self.setdefault(hash_id, key_of(hash_id))

    def keys_of(self, hash_ids: Iterable[int]) -> list[BlockKey]:
        return [self[hash_id] for hash_id in hash_ids]


def overlapping_hits(
    pool: TimedPool,
    requests: Sequence[TraceRequest],
    keys: KeyTable,
    on_requests: Callable[[int], None] = lambda count: None,
) -> int:
    """Blocks that hit in the pool while the requests overlap as in their trace. `on_requests` is called with how many
    were admitted."""
    running: dict[int, Admitted] = {}
    hits = 0
    for event in events(requests):
        request = requests[event.number]
        if event.is_end:
            pool.end(running.pop(event.number), event.at / 1000, request.stop)
            continue
        admitted = pool.admit(keys.keys_of(request.hash_ids), event.at / 1000, request.looked_up)
        running[event.number] = admitted
        hits += admitted.found
        if event.number % _TOLD == 0:
            on_requests(event.number)
    return hits


def foresight_hits(
    requests: Sequence[Sequence[int]], slots: float, asked: Sequence[tuple[int, int]] | None = None
) -> int:
    """Blocks that hit with perfect foresight; `slots` may be infinite. `asked`: see `TimedPool.admit`."""
    upcoming: dict[int, list[int]] = {}
    for number in range(len(requests) - 1, -1, -1):
        for block in requests[number]:
            upcoming.setdefault(block, []).append(number)
    next_use: dict[int, float] = {}
    heap: list[tuple[float, int, int]] = []
    hits = 0
    for number, request in enumerate(requests):
        ids = tuple(request)
        first, stop = asked[number] if asked is not None else (0, len(ids))
        hits += next((at for at in range(first, stop) if ids[at] not in next_use), stop) - first
        for depth, block in enumerate(ids):
            uses = upcoming[block]
            uses.pop()
            next_use[block] = uses[-1] if uses else inf
            if slots < inf:
                heappush(heap, (-next_use[block], -depth, block))
        while len(next_use) > slots:
            use, _, block = heappop(heap)
            if next_use.get(block) == -use:
                del next_use[block]
        if len(heap) > 4 * len(next_use) + _STALE:  # most entries are of uses that have come
            heap = [entry for entry in heap if next_use.get(entry[2]) == -entry[0]]
            heapify(heap)
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
    keys, asked = KeyTable(), [request.asked for request in requests]
    ids = [request.hash_ids for request in requests]
    blocks = sum(stop - first for first, stop in asked)
    done = 0
    found: dict[str, list[int]] = {policy: [] for policy in policies}
    for slots in sizes:
        for policy in policies:
            if policy == FORESIGHT:
                hits = foresight_hits(ids, slots, asked)
            else:
                hits = overlapping_hits(TimedPool(slots, policy), requests, keys, partial(_add, on_requests, done))
            found[policy].append(hits)
            done += len(requests)
            on_requests(done)
    everything = foresight_hits(ids, inf, asked) / max(1, blocks)
    return HitTable(tuple(sizes), slot_bytes, found, everything, len(requests), blocks)


def _add(on_requests: Callable[[int], None], before: int, count: int) -> None:
    on_requests(before + count)
