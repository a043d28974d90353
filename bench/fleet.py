"""A replay over several nodes in this process, each with a pool of its own, above one store of a fleet tier.

    python -m bench.fleet TRACE [--nodes N] [--slots N] [--routing prefix|random] [--store none|memory[:SIZE]]

One dispatcher sends one request at a time, in the order of the trace, so that hit ratios repeat. Prints the blocks that
hit, and what went to the store and came from it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from threading import Event
from typing import Literal, NamedTuple

from kvstow.bytesize import parse_size
from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier, TierSettings, TierWait
from kvstow.keys import BlockKey
from kvstow.messages import TierCompletion
from kvstow.results import Awaited, Given, Lease
from kvstow.testing.memorystore import MemoryStore
from kvstow.tier.store import MemoryRange, TierStore
from kvstow.tier.tierstatus import TierCounters, TierStatus
from kvstow.tier.transfers import StoreTransfers
from kvstow_service.replay.driver import ReplayDriver, blocks_needed
from kvstow_service.replay.offload import EmbeddedOffload
from kvstow_service.replay.ranks import LocalRank, ReplaySession, local_session
from kvstow_service.replay.result import ReplayResult
from kvstow_service.replay.trace import BLOCK_TOKENS, ReplayOptions, TraceRequest, even_shape, read_trace

Routing = Literal["prefix", "random"]

PATIENT = TierSettings(deadline=60.0, lookup_wait=60.0)
"""Without a prefill rate every fetch pays and is waited for, so that hit ratios do not depend on the machine."""
_TURN = 0.0005
_BOUND = 1.25
"""A node gets no request while its load is so many times the mean."""
_HALF_LIFE_MS = 60_000.0


class Router:
    """`prefix`: to the node whose pool has the longest leading run of the request's keys, among those whose load is
    near the mean; the load is the blocks that a node was given, those of a minute ago counting half. `random`: to any
    node, the same ones in each replay."""

    def __init__(self, nodes: int, routing: Routing, lookup: Callable[[int, Sequence[BlockKey]], int]) -> None:
        """`lookup`: how many leading keys the pool of a node has."""
        self._routing, self._lookup = routing, lookup
        self._loads = [0.0] * nodes
        self._now = 0.0
        self._random = random.Random(0)

    def node_for(self, request: TraceRequest) -> int:
        blocks = len(request.hash_ids)
        faded = 0.5 ** ((request.timestamp - self._now) / _HALF_LIFE_MS)
        self._now = request.timestamp
        self._loads = [load * faded for load in self._loads]
        node = self._random.randrange(len(self._loads)) if self._routing == "random" else self._best(request, blocks)
        self._loads[node] += blocks
        return node

    def _best(self, request: TraceRequest, blocks: int) -> int:
        most = _BOUND * (sum(self._loads) + blocks) / len(self._loads)
        keys = request.keys()
        able = [node for node, load in enumerate(self._loads) if load <= most]
        return max(able, key=lambda node: (self._lookup(node, keys), -self._loads[node]))


class _Found:
    """The answer to a request that waits for the store: what the pool has when the wait is over."""

    error = None

    def __init__(self, offload: TieredOffload, keys: Sequence[BlockKey], lease: Lease, wait: TierWait) -> None:
        self._offload, self._keys, self.value, self._wait = offload, keys, lease, wait
        self._is_over = False

    @property
    def done(self) -> bool:
        if not self._is_over and self._offload.tier.is_over(self._wait):
            self._is_over = True
            self.value = self._offload.find_again(self._keys, self.value)
        return self._is_over


class TieredOffload(EmbeddedOffload):
    """The engine in this process, with the tier under its pool. Used by one thread."""

    def __init__(
        self,
        engine: OffloadEngine,
        ranks: Sequence[LocalRank],
        store: TierStore,
        settings: TierSettings,
        hint_clock: Callable[[], float],
    ) -> None:
        super().__init__(engine)
        self._ranks = ranks
        self._news = Event()
        """Set when the tier has something to take in the next step."""
        self._ended = deque[tuple[int, TierCompletion]]()
        self._transfers = StoreTransfers(store.open_transfers())
        for rank in ranks:
            pool = rank.pool
            self._transfers.client.add_memory(MemoryRange(pool.address, pool.max_slots * pool.slot_stride))
        self._lookups = store.open_lookups()
        self.tier = FleetTier(
            engine,
            self._lookups,
            settings,
            "replay",
            name=store.name,
            hint_clock=hint_clock,
            on_news=self._news.set,
        )

    def _note(self, number: int, completion: TierCompletion) -> None:
        self._ended.append((number, completion))
        self._news.set()

    def close(self) -> None:
        self.tier.close()
        self._lookups.close()
        self._transfers.close()
        self._advance()

    def step(self) -> None:
        self._advance()

    def _advance(self) -> bool:
        """`step`; whether anything has come that a request may wait for."""
        has_news = self._news.is_set()
        self._news.clear()
        while self._ended:
            number, completion = self._ended.popleft()
            self._engine.complete(number, self._ranks[number].worker.boot_id, (completion,))
        self.tier.step()
        for number, op in self.tier.take_plans():
            self._transfers.submit(op, self._ranks[number].pool, number, len(self._ranks), partial(self._note, number))
        return has_news

    def wait(self, seconds: float) -> None:
        """Wait until a rank or the tier has news."""
        deadline = time.monotonic() + seconds
        if self._advance():
            return
        workers = [rank.worker for rank in self._ranks]
        while not any(worker.wait_completions(0.0) for worker in workers):
            left = deadline - time.monotonic()
            copying = next((worker for worker in workers if worker.pending_ops), None)
            if left <= 0 or self._news.wait(left if copying is None else 0.0):
                return
            if copying is not None and copying.wait_completions(min(_TURN, left)):
                return

    def settle(self) -> None:
        """Wait until everything is put that is to be put."""
        while True:
            self.step()
            if self.tier.is_idle:
                return
            self._news.wait(_TURN)

    def admit(self, keys: Sequence[BlockKey]) -> Awaited[Lease]:
        lease = self._engine.acquire(keys, count=False)
        wait = self.tier.look_for(keys, lease.num_keys) if lease.num_keys < len(keys) else None
        if wait is not None:
            return _Found(self, keys, lease, wait)
        self._engine.count_lookup(len(keys), lease.num_keys)
        return Given(lease)

    def find_again(self, keys: Sequence[BlockKey], before: Lease) -> Lease:
        """Look up what has arrived. Ends the lease of before."""
        lease = self._engine.acquire(keys)
        self._engine.release_lease(before)
        return lease


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `requests` grows while the trace goes on. `tier`: None without a store."""

    session: ReplaySession
    driver: ReplayDriver
    requests: list[TraceRequest]
    tier: TieredOffload | None

    def serve(self, request: TraceRequest) -> None:
        """Returns when the request is finished and what it stored is in the store."""
        self.requests.append(request)
        self.driver.run(Event())
        if self.tier is not None:
            self.tier.settle()


class FleetResult(NamedTuple):
    """Of all nodes together. `tier`: that of the node that has fetched most, with the counters and queues of all."""

    replay: ReplayResult
    tier: TierStatus | None


def replay(
    requests: Sequence[TraceRequest],
    store: TierStore | None,
    settings: TierSettings = PATIENT,
    *,
    nodes: int = 3,
    slots: int = 60,
    slot_bytes: int = 512,
    ranks: int = 1,
    routing: Routing = "prefix",
    prefill_rate: float | None = None,
    on_request: Callable[[Sequence[Node], int], None] = lambda nodes, number: None,
) -> FleetResult:
    """Replay to the end, and check that no byte was wrong, no slot has leaked and no request has failed.
    `on_request`: called after each request, with its number."""
    config = EngineConfig(slot_bytes=slot_bytes, capacity_slots=slots, num_ranks=ranks, block_tokens=BLOCK_TOKENS)
    now = 0.0
    options = ReplayOptions(prefill_rate=prefill_rate)
    with ExitStack() as stack:
        kv_blocks = blocks_needed(requests, 1)
        fleet = [
            stack.enter_context(_node(config, store, settings, options, kv_blocks, lambda: now)) for _ in range(nodes)
        ]
        router = Router(nodes, routing, lambda node, keys: fleet[node].session.engine.lookup(keys))
        started = time.monotonic()
        for number, request in enumerate(requests, start=1):
            now = request.timestamp / 1000
            fleet[router.node_for(request)].serve(request)
            on_request(fleet, number)
        found = [node.driver.result() for node in fleet]
        result = ReplayResult.together(found, seconds=time.monotonic() - started)
        for node in fleet:
            _check_slots(node.session.engine)
        statuses = [node.tier.tier.status() for node in fleet if node.tier is not None]
    problems = (result.mismatches, result.failed_loads, result.failed_stores, result.abandoned)
    if any(problems) or result.verified_bytes != result.loaded_bytes or result.requests != len(requests):
        raise RuntimeError(f"the replay went wrong: {result}")
    return FleetResult(result, _together(statuses) if statuses else None)


@contextmanager
def _node(
    config: EngineConfig,
    store: TierStore | None,
    settings: TierSettings,
    options: ReplayOptions,
    kv_blocks: int,
    hint_clock: Callable[[], float],
) -> Iterator[Node]:
    shape = even_shape(config.slot_bytes)
    with local_session(config, kv_blocks=kv_blocks, stop=Event(), shape=shape) as session, ExitStack() as stack:
        tier = None
        if store is not None:
            tier = TieredOffload(session.engine, session.ranks, store, settings, hint_clock)
            stack.callback(tier.close)
        requests: list[TraceRequest] = []
        driver = ReplayDriver(
            tier or EmbeddedOffload(session.engine),
            session.workers,
            session.kv,
            requests,
            options,
            kv_blocks=kv_blocks,
            wait=None if tier is None else tier.wait,
        )
        yield Node(session, driver, requests, tier)


def _check_slots(engine: OffloadEngine) -> None:
    engine.check_integrity()
    counts = engine.stats().pool.slots
    if counts != replace(counts, filling=0, leased=0, quarantined=0):
        raise RuntimeError(f"slots have leaked: {counts}")


def _together(tiers: Sequence[TierStatus]) -> TierStatus:
    busiest = max(tiers, key=lambda one: one.counters.fetched_blocks)
    counters = TierCounters(
        *(sum(getattr(one.counters, field.name) for one in tiers) for field in fields(TierCounters))
    )
    queues = ("putting_blocks", "fetching_blocks", "waiting_blocks")
    return replace(busiest, counters=counters, **{name: sum(getattr(one, name) for one in tiers) for name in queues})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--slots", type=int, default=2000, help="slots of each node's pool")
    parser.add_argument("--routing", choices=("prefix", "random"), default="prefix")
    parser.add_argument("--store", default="none", help="none, memory, or memory:SIZE")
    options = parser.parse_args()
    kind, _, size = options.store.partition(":")
    store = None if kind == "none" else MemoryStore(parse_size(size, "--store") if size else None)
    found, tier = replay(
        read_trace(options.trace), store, nodes=options.nodes, slots=options.slots, routing=options.routing
    )
    print(f"{found.block_hit_rate:.2%} of {found.blocks:,} blocks hit, in {found.seconds:.1f} s")
    if tier is not None:
        print(f"{tier.counters.put_blocks:,} blocks put, {tier.counters.fetched_blocks:,} fetched")


if __name__ == "__main__":
    main()
