"""The tier never makes requests slower, whatever the store's rate: a fleet on a fake clock, with modelled transfers and
prefill, so that the figures repeat. `python -m bench tier` measures the same with a real store and a link that is
slowed down."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
from tests.engine.conftest import Eventually
from tests.engine.control.conftest import MakeEngine
from tests.engine.control.tiernode import Objects, TierNode

from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier, TierSettings
from kvstow.messages import Mark, TierCompletion, TierOp
from kvstow.testing.fakes import FakeClock
from kvstow.testing.rank import make_ranks
from kvstow.testing.tier import ControlledStore
from kvstow.tier.rate import BreakEven, Estimate
from kvstow.tier.store import ObjectName

NODES, RANKS, SLOTS = 2, 2, 40
BLOCK_TOKENS = 10
PREFILL = 1_000.0  # tokens per second: a block takes 10 ms
LOOKUP_SECONDS = 0.001
LATENCY = 0.0005  # of a transfer

Request = list[bytes]


def conversations() -> list[Request]:
    """The requests of 12 conversations: each turn has the keys of the one before, and 2 to 5 more."""
    choose = random.Random(1)
    turns: list[Request] = [[] for _ in range(12)]
    requests: list[Request] = []
    for _ in range(150):
        number = choose.randrange(len(turns))
        if len(turns[number]) > SLOTS - 10:
            turns[number] = []
        first = len(requests).to_bytes(2, "big")
        turns[number] = turns[number] + [first + bytes([number, at]) for at in range(choose.randint(2, 5))]
        requests.append(turns[number])
    return requests


def hits_of_an_endless_tier(requests: list[Request]) -> int:
    seen: set[bytes] = set()
    hits = 0
    for keys in requests:
        hits += next((at for at, key in enumerate(keys) if key not in seen), len(keys))
        seen.update(keys)
    return hits


class TimedNode(TierNode):
    """A node whose ranks take as long for each fetch as `rate`, in bytes per second, says. Puts take no time."""

    def __init__(
        self, engine: OffloadEngine, clock: FakeClock, store: ControlledStore, objects: Objects, rate: float
    ) -> None:
        super().__init__(engine, make_ranks(engine), objects)
        self.forgets = True
        self.clock, self.names, self.rate = clock, store, rate
        self.slot_bytes = engine.pool.config.slot_bytes
        settings = TierSettings(lookup_wait=0.02, prefill_rate=PREFILL)
        self.fleet = FleetTier(engine, store.open_lookups(), settings, "f", clock=clock)
        self.tier = self.fleet.traffic
        self.ends: dict[tuple[int, int], float] = {}
        self.is_free = dict.fromkeys(range(RANKS), 0.0)

    def seconds(self, op: TierOp) -> float:
        return 0.0 if op.direction == "put" else LATENCY + len(op.slots) * self.slot_bytes / self.rate

    def send(self, rank: int, op: TierOp, mark: Mark = "done", moved: int | None = None) -> None:
        moved = len(op.keys) if moved is None else moved
        done = TierCompletion(op.op_id, mark, None, seconds=self.seconds(op), moved=moved)
        self.engine.complete(rank, self.ranks[rank].boot_id, [done])
        if op.direction == "put" and rank == 0:
            for key in op.keys[:moved]:
                self.names.put(str(ObjectName("f", key, 0, RANKS)), b"x")

    def next_end(self) -> tuple[float, int, TierOp] | None:
        """The transfer that ends next."""
        self.deliver()
        for rank, queue in self.queues.items():
            for op in queue.values():
                if (rank, op.op_id) not in self.ends:
                    begins = self.clock() if op.direction == "put" else max(self.clock(), self.is_free[rank])
                    self.ends[rank, op.op_id] = begins + self.seconds(op)
                    if op.direction == "fetch":
                        self.is_free[rank] = self.ends[rank, op.op_id]
        running = [
            (self.ends[rank, op.op_id], rank, op) for rank, queue in self.queues.items() for op in queue.values()
        ]
        return min(running, key=lambda one: one[:2], default=None)

    def pass_time(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Transfers go on until then, or until `is_over`."""
        while not is_over():
            following = self.next_end()
            if following is None or following[0] > until:
                self.clock.advance(until - self.clock())
                return
            end, rank, op = following
            self.clock.advance(max(0.0, end - self.clock()))
            self.run(rank, op)
            self.fleet.step()


class Figures(NamedTuple):
    mean_seconds: float
    hits: int
    declined: int


class Run:
    """Serves requests on random nodes, one after the other."""

    def __init__(self, nodes: list[TimedNode], clock: FakeClock, eventually: Eventually, *, tier: bool) -> None:
        self.nodes, self.clock, self.eventually, self.tier = nodes, clock, eventually, tier

    def serve(self, node: TimedNode, keys: Request) -> int:
        """Returns how many blocks hit."""
        if self.tier and node.engine.lookup(keys) < len(keys):
            self.fetch(node, keys)
        hits = node.loaded(keys)
        node.pass_time(self.clock() + (len(keys) - hits) * BLOCK_TOKENS / PREFILL)
        if hits < len(keys):
            node.store(keys[hits:])
        node.fleet.step()
        node.pass_time(self.clock())
        return hits

    def fetch(self, node: TimedNode, keys: Request) -> None:
        wait = node.fleet.look_for(keys)
        node.pass_time(self.clock() + LOOKUP_SECONDS)

        def has_heard() -> bool:
            node.fleet.step()
            return not node.fleet._asked

        self.eventually(has_heard)
        while wait is not None and not node.fleet.is_over(wait):
            node.pass_time(wait.until, lambda: node.fleet.is_over(wait))

    def all(self, requests: list[Request]) -> Figures:
        choose = random.Random(2)
        began, hits = self.clock(), 0
        for keys in requests:
            hits += self.serve(choose.choice(self.nodes), keys)
            self.clock.advance(10.0)  # until the next one comes: answers are old by then
        declined = sum(node.fleet.status().counters.declined_requests for node in self.nodes)
        return Figures((self.clock() - began) / len(requests) - 10.0, hits, declined)


@pytest.fixture
def replay(make_engine: MakeEngine, eventually: Eventually) -> Callable[[float | None], Figures]:
    def run(rate: float | None) -> Figures:
        """`rate` of the store, as a multiple of the break-even; None: without a tier."""
        clock, store, objects = FakeClock(), ControlledStore(), Objects()
        with timed_nodes(make_engine, clock, store, objects, rate or 1.0) as nodes:
            return Run(nodes, clock, eventually, tier=rate is not None).all(conversations())

    return run


@contextmanager
def timed_nodes(
    make_engine: MakeEngine, clock: FakeClock, store: ControlledStore, objects: Objects, rate: float
) -> Iterator[list[TimedNode]]:
    nodes = []
    try:
        for _ in range(NODES):
            engine = make_engine(SLOTS, RANKS, block_tokens=BLOCK_TOKENS)
            break_even = engine.pool.config.slot_bytes * PREFILL / BLOCK_TOKENS
            nodes.append(TimedNode(engine, clock, store, objects, rate * break_even))
        yield nodes
    finally:
        for node in nodes:
            node.fleet.close()


def test_a_quick_store_saves_time_and_a_slow_one_costs_none(replay: Callable[[float | None], Figures]) -> None:
    alone, quick, slow = replay(None), replay(3.0), replay(0.3)
    assert quick.hits >= 0.9 * hits_of_an_endless_tier(conversations())
    assert quick.mean_seconds <= alone.mean_seconds, "a quick store costs time"
    assert slow.mean_seconds <= 1.05 * alone.mean_seconds, "a slow store costs time"
    assert slow.declined > 0


def fetches_always_pay(patch: pytest.MonkeyPatch) -> None:
    decide = BreakEven.decide

    def always(self: BreakEven, *arguments: int) -> Estimate:
        estimate = decide(self, *arguments)._replace(pays=True)
        self.pays = True
        return estimate

    patch.setattr(BreakEven, "decide", always)
    patch.setattr(BreakEven, "may_pay", True)


def test_without_break_even_a_slow_store_costs_time(
    replay: Callable[[float | None], Figures], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches_always_pay(monkeypatch)
    with pytest.raises(AssertionError, match="a slow store costs time"):
        test_a_quick_store_saves_time_and_a_slow_one_costs_none(replay)
