"""A store below the pool never makes requests slower, whatever its rate: a pool on a fake clock, with modelled reads
and prefill, so that the figures repeat."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from tests.doubles.memoryblockstore import MemoryBlockStore
from tests.engine.control.tieredpool import PREFILL, TieredPool

from kvstow.control.session import result_of
from kvstow.tier.blockstore import Expectation
from kvstow.tier.breakeven import BreakEven, Estimate

SLOTS = 80
BLOCK_SECONDS = 10 / PREFILL
LATENCY = 0.0005

Prompt = list[bytes]


def conversations() -> list[Prompt]:
    """The requests of 12 conversations: each turn has the keys of the one before, and 2 to 5 more."""
    choose = random.Random(1)
    turns: list[Prompt] = [[] for _ in range(12)]
    requests: list[Prompt] = []
    for _ in range(150):
        number = choose.randrange(len(turns))
        if len(turns[number]) > 30:
            turns[number] = []
        first = len(requests).to_bytes(2, "big")
        turns[number] = turns[number] + [first + bytes([number, at]) for at in range(choose.randint(2, 5))]
        requests.append(turns[number])
    return requests


def hits_of_an_endless_store(requests: list[Prompt]) -> int:
    seen: set[bytes] = set()
    hits = 0
    for keys in requests:
        hits += next((at for at, key in enumerate(keys) if key not in seen), len(keys))
        seen.update(keys)
    return hits


class Figures(NamedTuple):
    mean_seconds: float
    hits: int
    declined: int


def replay(rate: float | None) -> Figures:
    """`rate`: of the store, as a multiple of that at which reading takes as long as computing; None: nothing is in the
    store."""
    store = MemoryBlockStore(most_in_piece=1)
    tiered = TieredPool(SLOTS, store=store)
    seconds = BLOCK_SECONDS / (rate or 1.0)
    store.expectation = lambda num_blocks: Expectation(LATENCY + num_blocks * seconds, 0, 0.0)
    if rate is None:
        store.wants = lambda key, is_use: False
    requests, began, hits = conversations(), tiered.clock(), 0
    for keys in requests:
        request = tiered.look(keys, first=tiered.engine.session.lookup(keys))
        while request.wait is not None and not request.is_over:
            tiered.clock.advance(min(seconds, max(0.0, request.wait.until - tiered.clock())))
            tiered.tier.expire()
            pool = store.pools[0]
            pool.move(pool.reads)
            while tiered.answers:
                tiered.answers.pop()()
        request.end()
        found = tiered.loaded(keys)
        hits += found
        tiered.clock.advance((len(keys) - found) * BLOCK_SECONDS)
        if found < len(keys):
            tiered.store_blocks(keys[found:])
        tiered.use(keys)
        for _ in keys:  # writes take no time
            tiered.run()
            result_of(tiered.tier.note_use(tiered.of, keys))
        tiered.run()
    return Figures((tiered.clock() - began) / len(requests), hits, tiered.of.counters.declined_requests)


def test_a_quick_store_saves_time_and_a_slow_one_costs_none() -> None:
    alone, quick, slow = replay(None), replay(3.0), replay(0.3)
    assert quick.hits >= 0.9 * hits_of_an_endless_store(conversations())
    assert quick.mean_seconds <= 0.8 * alone.mean_seconds, "a quick store saves no time"
    assert slow.mean_seconds <= 1.02 * alone.mean_seconds, "a slow store costs time"
    assert slow.declined > 0


def reads_always_pay(patch: pytest.MonkeyPatch) -> None:
    decide = BreakEven.decide

    def always(self: BreakEven, expected: Expectation, read: int, computed: int, behind: int = 0) -> Estimate:
        return decide(self, expected, read, computed, behind)._replace(pays=True)

    patch.setattr(BreakEven, "decide", always)


def test_without_break_even_a_slow_store_costs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reads_always_pay(monkeypatch)
    with pytest.raises(AssertionError, match="a slow store costs time"):
        test_a_quick_store_saves_time_and_a_slow_one_costs_none()
