"""The family `vllm:kv_offload_*`: what becomes of the engine's counters. No vLLM is needed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.keys import chain_keys
from kvstow.messages import Completion, Op, RankReport
from kvstow.stats import Histogram, HistogramSnapshot
from kvstow.testing.clock import FakeClock
from kvstow_service.connectors.vllm.family import DEPRECATED, FAMILY, INFO, Reading, merge, observations, watched

SLOT = 1 << 20
KEYS = list(chain_keys([bytes([i]) for i in range(16)]))


@pytest.fixture
def engine() -> OffloadEngine:
    engine = OffloadEngine(EngineConfig(slot_bytes=SLOT, capacity_slots=4))
    engine.report(RankReport(0, "boot", "ready", SLOT, 4, 4, 4 * SLOT, 4 * SLOT, sender="process", number=1))
    return engine


def finish(engine: OffloadEngine, op: Op | None, seconds: float = 0.5) -> None:
    assert op is not None
    num_bytes = len(op.blocks) * SLOT
    engine.complete(0, "boot", [Completion(op.op_id, "done", None, num_bytes, seconds)])


def read(engine: OffloadEngine) -> Reading:
    return Reading(engine.stats(), slot_bytes=2 * SLOT, slot_tokens=16)


def test_the_first_changes_tell_the_configuration(engine: OffloadEngine) -> None:
    changes = read(engine).since(None)
    assert changes[INFO] == {
        "cpu_num_chunks": "4",
        "cpu_blocks_per_chunk": "1",
        "cpu_kv_cache_size_bytes": str(8 * SLOT),
        "cpu_kv_cache_size_tokens": "64",
    }
    assert changes["cpu_cache_usage_perc"] == 0


def test_whatever_is_told_is_watched(engine: OffloadEngine) -> None:
    ops: list[Op | None] = []

    def finish_and_begin_another() -> None:
        finish(engine, ops[-1])
        ops.append(engine.begin_store(KEYS[6:8], [0, 1]).op)

    steps: list[Callable[[], object]] = [
        lambda: ops.append(engine.begin_store(KEYS[:2], [7, 8]).op),
        lambda: finish(engine, ops[-1]),
        lambda: ops.append(engine.begin_load(engine.acquire(KEYS[:2]), [1, 2])),
        lambda: finish(engine, ops[-1]),
        lambda: engine.acquire(KEYS[5:6]),
        lambda: ops.append(engine.begin_store(KEYS[2:4], [0, 1]).op),
        finish_and_begin_another,
        lambda: finish(engine, ops[-1]),
        lambda: engine.begin_store(KEYS[8:12], range(4)),
        lambda: engine.begin_store(KEYS[12:13], [4]),  # all slots are being filled
        lambda: engine.admin.resize(6).run(),  # as yet without memory
    ]
    for step in steps:
        before, stats = read(engine), engine.stats()
        step()
        assert read(engine).since(before)
        assert watched(engine.stats()) != watched(stats)


def test_nothing_changed_is_empty(engine: OffloadEngine) -> None:
    assert read(engine).since(read(engine)) == {}
    assert watched(engine.stats()) == watched(engine.stats())


def test_a_store_and_a_load(engine: OffloadEngine) -> None:
    before = read(engine)
    op = engine.begin_store(KEYS[:3], [7, 8, 9]).op
    storing = read(engine)
    assert storing.since(before) == {"cpu_cache_usage_perc": 0.75, "cpu_cache_write_usage_perc": 0.75}
    finish(engine, op, seconds=0.25)
    stored = read(engine)
    assert stored.since(storing) == {
        "store_bytes": 3 * 2 * SLOT,  # of both ranks
        "store_time": 0.25,
        "store_size": [3 * SLOT],
        "cpu_cache_usage_perc": 0,
        "cpu_cache_write_usage_perc": 0,
    }
    op = engine.begin_load(engine.acquire(KEYS[:2]), [1, 2])
    finish(engine, op)
    changes = read(engine).since(stored)
    assert len(changes.pop("lookup_sync_delay_seconds")) == 1
    assert changes == {"load_bytes": 2 * 2 * SLOT, "load_time": 0.5, "load_size": [2 * SLOT]}


def test_a_hit_that_waits_counts_as_reading(engine: OffloadEngine) -> None:
    finish(engine, engine.begin_store(KEYS[:2], [7, 8]).op)
    engine.acquire(KEYS[:2])
    assert read(engine).since(None)["cpu_cache_read_usage_perc"] == 0.5


def test_a_store_that_was_given_up_still_takes_room() -> None:
    clock = FakeClock()
    engine = OffloadEngine(EngineConfig(slot_bytes=SLOT, capacity_slots=4, transfer_timeout=1.0), clock=clock)
    engine.report(RankReport(0, "boot", "ready", SLOT, 4, 4, 4 * SLOT, 4 * SLOT, sender="process", number=1))
    engine.begin_store(KEYS[:2], [7, 8])
    clock.advance(2.0)
    engine.tick()
    assert read(engine).since(None)["cpu_cache_write_usage_perc"] == 0.5


def test_blocks_without_room_are_allocation_failures(engine: OffloadEngine) -> None:
    before = read(engine)
    engine.begin_store(KEYS[:6], list(range(6)))
    assert read(engine).since(before)["allocation_failure"] == 2


def test_a_resize_tells_the_configuration_again(engine: OffloadEngine) -> None:
    before = read(engine)
    assert engine.admin.resize(3).run().finished
    assert read(engine).since(before)[INFO]["cpu_num_chunks"] == "3"


def test_several_groups_have_no_number_of_tokens(engine: OffloadEngine) -> None:
    assert Reading(engine.stats(), SLOT, None).since(None)[INFO]["cpu_kv_cache_size_tokens"] == "None"


BOUNDS = (1.0, 4.0, 16.0)
values = st.lists(st.floats(0, 64, allow_subnormal=False))


def buckets(observed: list[float]) -> list[int]:
    counts = [0] * (len(BOUNDS) + 1)
    for value in observed:
        counts[bisect_left(BOUNDS, value)] += 1
    return counts


@given(values, values)
def test_observations_fall_into_the_same_buckets_and_have_the_same_sum(first: list[float], then: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in first:
        histogram.observe(value)
    before = histogram.snapshot()
    for value in then:
        histogram.observe(value)
    made = list(observations(before, histogram.snapshot()))
    assert buckets(made) == buckets(then)
    assert sum(made) == pytest.approx(sum(then), abs=1e-6)


@pytest.mark.parametrize("value", [0.5, 1.0, 3.5, 4.0, 17.0])
def test_one_observation_is_itself(value: float) -> None:
    after = HistogramSnapshot(BOUNDS, tuple(buckets([value])), value)
    assert list(observations(None, after)) == [pytest.approx(value)]


def test_observations_at_the_lower_edge_stay_in_their_bucket() -> None:
    after = HistogramSnapshot(BOUNDS, (0, 2, 0, 0), 2.0)  # rounding has left no more than the edges
    assert buckets(list(observations(None, after))) == [0, 2, 0, 0]


def test_changes_add_up(engine: OffloadEngine) -> None:
    start = read(engine)
    sum_of_parts = start.since(None)
    whole = dict(sum_of_parts)
    last = start
    for keys in (KEYS[:1], KEYS[1:3]):
        finish(engine, engine.begin_store(keys, list(range(len(keys)))).op)
        now = read(engine)
        merge(sum_of_parts, now.since(last))
        last = now
    merge(whole, last.since(start))
    assert sum_of_parts == whole | {"store_size": [SLOT, 2 * SLOT]}


def test_every_deprecated_metric_mirrors_one_of_its_kind() -> None:
    for name, (older, _) in DEPRECATED.items():
        assert FAMILY[name].kind == FAMILY[older].kind
        assert FAMILY[name].bounds == FAMILY[older].bounds
