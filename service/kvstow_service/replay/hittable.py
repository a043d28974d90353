"""Computes how much of a trace hits, by size and policy. It runs real control planes without ranks, in the trace's
time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from typing import Any, NamedTuple

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.hints import Hints
from kvstow.keys import BlockKey
from kvstow.messages import Completion, RankReport
from kvstow_service.replay.trace import TraceRequest, ending_of_trace, events, key_of

FORESIGHT = "min"
"""A name that may be given in place of a policy. It evicts the block whose next use comes last or never."""
_SLOT_BYTES = 64
_BOOT = "simulated"
_TICK = 1e-6
"""The time between two requests that have the same time in the trace, in seconds. Without it, chance would decide which
of them is older."""
_HOST_TICK = 1.0
_TOLD = 64  # `on_requests` is called after this many requests
_STALE = 1 << 16


class Admitted(NamedTuple):
    """A request that a pool has admitted. `asked` is the range of its `keys` that it has looked up. `found` is how many
    of them were present before the first absent one. `number` is the control plane's number of the request."""

    keys: Sequence[BlockKey]
    asked: tuple[int, int]
    found: int
    number: int


class TimedPool:
    """A control plane whose clock shows the trace's time, and whose copies end at once.

    It learns of a request only by `admit` and `end`, which come in this order, with calls for other requests in
    between. Everything that a connector tells its control plane at these two moments belongs there.
    """

    def __init__(self, slots: int, policy: str, *, curve: bool = False) -> None:
        self.now, self._next_tick = 0.0, _HOST_TICK
        config = EngineConfig(slot_bytes=_SLOT_BYTES, capacity_slots=slots, policy=policy, curve=curve)
        self.engine = OffloadEngine(config, clock=lambda: self.now)
        no_pool = RankReport.without_pool(0, _BOOT, "ready", _SLOT_BYTES)
        self.engine.report(replace(no_pool, pinned_slots=slots, target_slots=slots, number=1))

    def admit(
        self,
        keys: Sequence[BlockKey],
        now: float,
        asked: tuple[int, int] | None = None,
        hints: Hints | None = None,
    ) -> Admitted:
        """Begin a request, at a time in seconds. It looks up the range `asked` of its blocks, or all if that is None:
        the GPU has the blocks before the range. Like a connector, it offers all blocks for storing except those that it
        has found. That includes those on the GPU, because the pool may have lost them. `hints` is what its client says
        about the next request."""
        self._go_on(now)
        engine = self.engine
        first, stop = asked or (0, len(keys))
        lease = engine.acquire(keys[first:stop])
        found = len(lease.slots)
        number = engine.admit(keys, looked_up=(first, stop), hints=hints)
        rest = [*keys[:first], *keys[first + found :]]
        if rest:
            self._store(rest, now)
        engine.release_lease(lease)
        return Admitted(keys, (first, stop), found, number)

    def _store(self, keys: Sequence[BlockKey], now: float) -> None:
        engine = self.engine
        op = engine.begin_store(keys, range(len(keys))).op
        if op is not None:
            self._go_on(now)  # so that the store ends later than the lookup
            engine.complete(0, _BOOT, [Completion(op.op_id, "done", None, _SLOT_BYTES, 0.001)])
        engine.take_settled()

    def end(self, request: Admitted, now: float, stop: str | None = None) -> None:
        """End a request. `stop` says how it ended, as in its trace. Blocks that the pool has refused, or lent to
        others, are stored now."""
        self._go_on(now)
        if self.engine.end_request(request.number, ending_of_trace(stop)).is_incomplete:
            self._store(request.keys, now)

    def serve(
        self,
        keys: Sequence[BlockKey],
        now: float,
        asked: tuple[int, int] | None = None,
        hints: Hints | None = None,
    ) -> int:
        """Begin and end a request at once. Returns how many leading blocks were found."""
        request = self.admit(keys, now, asked, hints)
        self.end(request, now)
        return request.found

    def _go_on(self, now: float) -> None:
        self.now = max(now, self.now + _TICK)

    def tick(self, now: float) -> None:
        """Tick the control plane as a host does once a second. More frequent calls have no effect."""
        if now >= self._next_tick:
            self._go_on(now)
            self._next_tick = now + _HOST_TICK
            self.engine.tick()


class KeysById(dict[int, BlockKey]):
    """The key of each block id. Each is made once."""

    def __missing__(self, hash_id: int) -> BlockKey:
        return self.setdefault(hash_id, key_of(hash_id))

    def keys_of(self, hash_ids: Iterable[int]) -> list[BlockKey]:
        return [self[hash_id] for hash_id in hash_ids]


class GPUCache:
    """The prefix cache of a GPU. It has a fixed number of blocks, which includes those of running requests. These
    cannot be evicted. The others are evicted in the order of their last use."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._users: dict[int, int] = {}
        self._idle: dict[int, None] = {}
        """Blocks that no request uses. The one that is evicted next comes first."""

    def admit(self, hash_ids: Sequence[int]) -> int:
        """Begin a request. Returns how many of its leading blocks were present."""
        ids = tuple(hash_ids)
        found = next((at for at, one in enumerate(ids) if one not in self._users and one not in self._idle), len(ids))
        for one in ids:
            self._idle.pop(one, None)
            self._users[one] = self._users.get(one, 0) + 1
        self._evict()
        return found

    def end(self, hash_ids: Sequence[int]) -> None:
        for one in reversed(tuple(hash_ids)):
            self._users[one] -= 1
            if not self._users[one]:
                del self._users[one]
                self._idle[one] = None
        self._evict()

    def _evict(self) -> None:
        for one in list(islice(self._idle, max(0, len(self._users) + len(self._idle) - self._blocks))):
            del self._idle[one]


def overlapping_hits(
    pool: TimedPool,
    requests: Sequence[TraceRequest],
    keys: KeysById,
    on_requests: Callable[[int], None] = lambda count: None,
    *,
    hints: Callable[[int], Hints | None] = lambda number: None,
    gpu: GPUCache | None = None,
) -> int:
    """Return how many blocks hit in the pool, or before it in the GPU's cache, if requests overlap as in their trace.
    `on_requests` is called with the number of admitted requests. `hints` returns the hints of the request with this
    number."""
    running: dict[int, Admitted] = {}
    hits = 0
    for event in events(requests):
        request = requests[event.number]
        pool.tick(event.at / 1000)
        if event.is_end:
            pool.end(running.pop(event.number), event.at / 1000, request.stop)
            if gpu is not None:
                gpu.end(request.hash_ids)
            continue
        asked = request.looked_up
        if gpu is not None:
            asked = gpu.admit(request.hash_ids), len(request.hash_ids)
            hits += asked[0]
        admitted = pool.admit(keys.keys_of(request.hash_ids), event.at / 1000, asked, hints(event.number))
        running[event.number] = admitted
        hits += admitted.found
        if event.number % _TOLD == 0:
            on_requests(event.number)
    return hits


def foresight_hits(
    requests: Sequence[Sequence[int]], slots: float, asked: Sequence[tuple[int, int]] | None = None
) -> int:
    """Return how many blocks hit with perfect foresight. `slots` may be infinite. For `asked`, see
    `TimedPool.admit`."""
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
        if len(heap) > 4 * len(next_use) + _STALE:  # most entries are of uses that lie in the past
            heap = [entry for entry in heap if next_use.get(entry[2]) == -entry[0]]
            heapify(heap)
    return hits


class HitTable(NamedTuple):
    """How many of the `blocks` that were looked up hit, by policy, for each of the `sizes` in slots. `everything` is
    the share that hits in a pool that never evicts."""

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
    """Compute the table. `on_requests` is called with the number of finished requests of all pools together."""
    keys, asked = KeysById(), [request.asked for request in requests]
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
