"""The order of eviction, against simulations that share nothing with the engine."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Event

import pytest
from bench.kvstow_subject import EngineSubject
from tests.embeddedreplay import EmbeddedOffload, LocalRanks, replay_driver

from kvstow_service.replay.driver import blocks_needed
from kvstow_service.replay.result import ReplayResult
from kvstow_service.replay.trace import ReplayOptions, TraceRequest, read_trace

MOONCAKE = Path(__file__).parents[3].parent / "shared" / "data" / "conversation_trace.jsonl"


def replay(
    requests: Sequence[TraceRequest], slots: int, *, policy: str = "lru", ranks: int = 1, concurrency: int = 1
) -> ReplayResult:
    subject, kv_blocks = EngineSubject(slots, policy=policy, ranks=ranks), blocks_needed(requests, concurrency)
    offload, options = EmbeddedOffload(subject.engine, subject.workers), ReplayOptions(concurrency=concurrency)
    driver = replay_driver(offload, LocalRanks(subject.workers), requests, options, kv_blocks=kv_blocks)
    result = driver.run(Event())
    assert driver.free_blocks == kv_blocks
    assert subject.engine.stats().pool.leases == 0
    subject.engine.check_integrity()
    subject.engine.close()
    return result


def lru_hits(requests: Iterable[TraceRequest], slots: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for hash_id in request.hash_ids:
            if hash_id not in cache:
                break
            hits += 1
        for hash_id in reversed(request.hash_ids):
            cache[hash_id] = None
            cache.move_to_end(hash_id)
            if len(cache) > slots:
                cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("slots", [45, 100, 250, 600, 5000])
def test_hits_are_those_of_a_plain_lru_cache(conversations: list[TraceRequest], slots: int) -> None:
    result = replay(conversations, slots)
    assert result.hit_blocks == lru_hits(conversations, slots)
    assert result.blocks == sum(len(request.hash_ids) for request in conversations)
    assert result.requests == len(conversations)


def test_blocks_are_hit_stored_or_evicted(conversations: list[TraceRequest]) -> None:
    result = replay(conversations, 100)
    assert result.loaded.blocks == result.hit_blocks
    assert result.stored.blocks == result.blocks - result.hit_blocks
    assert result.evicted_blocks == result.stored.blocks - 100
    assert (result.dropped_stores, result.loaded.num_bytes, result.loaded.gbps) == (0, 0, 0.0)


def test_overlapping_requests_leave_the_books_balanced(conversations: list[TraceRequest]) -> None:
    result = replay(conversations, 250, ranks=2, concurrency=8)
    assert result.requests == len(conversations)


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the production trace is not beside the checkout")
@pytest.mark.parametrize(("slots", "percent"), [(1000, 4.45), (10000, 21.16), (30000, 32.57)])
def test_hit_rates_of_the_production_trace_are_the_published_ones(slots: int, percent: float) -> None:
    assert replay(read_trace(str(MOONCAKE)), slots).block_hit_rate * 100 == pytest.approx(percent, abs=0.02)
