"""Tables of hits by size and policy, and recordings that they replay."""

from __future__ import annotations

from math import inf

import pytest

from kvstow_service.replay import hittable
from kvstow_service.replay.hittable import (
    FORESIGHT,
    GPUCache,
    KeysById,
    TimedPool,
    foresight_hits,
    hit_table,
    overlapping_hits,
)
from kvstow_service.replay.trace import TraceRequest, TraceShape, generate_trace, parse_trace

REQUESTS = generate_trace(TraceShape(sessions=40, turns=4, shared_prompts=3, seed=7))
SLOT_BYTES = 1 << 20


def test_a_recording_hits_in_a_table_what_the_live_pool_has_hit() -> None:
    """The GPU has the beginning of some chains, and computes the end of all."""
    slots, live = 120, 0
    pool = TimedPool(slots, "lru")
    asked = 0
    with pool.engine.record(seconds=60.0, max_bytes=1 << 24) as recording:
        for number, request in enumerate(REQUESTS):
            length = len(request.hash_ids)
            looked_up = (min(number % 3, length - 1), length - 1)
            live += pool.serve(request.keys(), request.timestamp / 1000, looked_up)
            asked += max(0, looked_up[1] - looked_up[0])
        lines = []
        while taken := recording.take().lines:
            lines += taken.splitlines()
    recorded = list(parse_trace(lines, "recorded"))
    assert len(recorded) == len(REQUESTS)
    table = hit_table(recorded, [slots], ["lru"], SLOT_BYTES)
    assert (table.blocks, table.requests) == (asked, len(REQUESTS))
    assert table.ratios["lru"] == [pytest.approx(live / asked)]
    assert 0 < live < asked


def test_foresight_is_never_beaten_and_everything_is_what_was_there_before() -> None:
    table = hit_table(REQUESTS, [60, 240], ["lru", "auto", FORESIGHT], SLOT_BYTES)
    for policy in ("lru", "auto"):
        for found, best in zip(table.ratios[policy], table.ratios[FORESIGHT], strict=True):
            assert found <= best <= table.everything
    seen: set[int] = set()
    hits = 0
    for request in REQUESTS:
        hits += next((at for at, block in enumerate(request.hash_ids) if block not in seen), len(request.hash_ids))
        seen.update(request.hash_ids)
    assert foresight_hits([request.hash_ids for request in REQUESTS], inf) == hits
    assert table.everything == pytest.approx(hits / table.blocks)


def test_progress_reaches_all_requests_of_all_pools() -> None:
    told: list[int] = []
    hit_table(REQUESTS[:70], [8, 16], ["lru", FORESIGHT], SLOT_BYTES, told.append)
    assert told == sorted(told)
    assert told[-1] == 4 * 70


def test_requests_that_looked_nothing_up_are_no_hits() -> None:
    request = TraceRequest(0, 0, 2, (1, 2), (0, 0))
    table = hit_table([request, request], [8], ["lru"], SLOT_BYTES)
    assert (table.blocks, table.ratios, table.everything) == (0, {"lru": [0.0]}, 0.0)


@pytest.mark.parametrize("end_of_the_first", [5, 30])
def test_a_request_counts_as_used_when_it_begins_whenever_it_ends(end_of_the_first: float) -> None:
    """A third one needs two slots, after both have ended."""
    first, second = TraceRequest(0, 1, 1, (1, 2), end=end_of_the_first), TraceRequest(10, 1, 1, (3, 4), end=20)
    third = TraceRequest(40, 1, 1, (5, 6))
    for again, hits in (((3, 4), 2), ((1, 2), 0)):
        requests = [first, second, third, TraceRequest(50, 1, 1, again)]
        assert hit_table(requests, [4], ["lru"], SLOT_BYTES).hits["lru"] == [hits]


def test_foresight_forgets_the_uses_that_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    chains = [list(request.hash_ids) for request in REQUESTS]
    expected = foresight_hits(chains, 60)
    monkeypatch.setattr(hittable, "_STALE", 0)
    assert foresight_hits(chains, 60) == expected


def test_a_gpu_keeps_what_runs_and_evicts_the_oldest_of_the_rest() -> None:
    gpu = GPUCache(4)
    assert gpu.admit([1, 2, 3]) == 0
    assert gpu.admit([1, 2, 4, 5]) == 2, "five blocks run, more than it has"
    gpu.end([1, 2, 3])
    assert gpu.admit([3]) == 0, "no request needed it, so it was evicted at once"
    gpu.end([3])
    gpu.end([1, 2, 4, 5])
    assert gpu.admit([1, 2, 4, 5]) == 4
    assert gpu.admit([1, 2, 3]) == 2


def test_what_the_gpu_has_hits_there_and_the_rest_in_the_pool() -> None:
    """The GPU forgets the first request when the second one comes; the pool has both. It is offered what the GPU had,
    too, because it may have lost that."""
    first, second = TraceRequest(0, 1, 1, (1, 2)), TraceRequest(10, 1, 1, (3, 4, 5))
    longer, again = TraceRequest(20, 1, 1, (3, 4, 5, 6)), TraceRequest(30, 1, 1, (1, 2))
    pool = TimedPool(8, "lru")
    hits = overlapping_hits(pool, [first, second, longer, again], KeysById(), gpu=GPUCache(3))
    assert (hits, pool.engine.stats().lookups.hit_blocks) == (3 + 2, 2)
    small = TimedPool(3, "lru")
    overlapping_hits(small, [first, second, longer], KeysById(), gpu=GPUCache(3))
    assert small.engine.lookup(longer.keys()) == 3


def test_hints_are_given_with_the_request_that_they_are_of() -> None:
    given: list[int] = []
    requests = [TraceRequest(0, 1, 1, (1,), end=30), TraceRequest(10, 1, 1, (2,), end=20)]

    def hints(number: int) -> None:
        given.append(number)

    overlapping_hits(TimedPool(8, "lru"), requests, KeysById(), hints=hints)
    assert given == [0, 1]
