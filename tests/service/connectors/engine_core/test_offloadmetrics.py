"""The family `vllm:kv_offload_*`: what it makes of the engine's counters. Needs no vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import make_ranks
from tests.service.connectors.engine_core.vllmhost import FakeRequest, VllmHost, keys_of

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.keys import chain_keys
from kvstow.messages import Completion, Op
from kvstow_service.connectors.engine_core.offloadmetrics import INFO, Changes, changes_between, merge, read_family

SLOT = 1 << 20
KEYS = list(chain_keys([bytes([i]) for i in range(16)]))


@pytest.fixture
def engine() -> OffloadEngine:
    engine = OffloadEngine(EngineConfig(slot_bytes=SLOT, capacity_slots=4))
    make_ranks(engine)
    return engine


def finish(engine: OffloadEngine, op: Op | None, seconds: float = 0.5) -> None:
    assert op is not None
    num_bytes = len(op.blocks) * SLOT
    (boot_id,) = engine.ranks.boots
    engine.complete(0, boot_id, [Completion(op.op_id, "done", None, num_bytes, seconds)])


def read(engine: OffloadEngine) -> dict[str, Any]:
    return read_family(engine.stats(), slot_bytes=2 * SLOT, slot_tokens=16)


def test_the_first_changes_include_the_configuration(engine: OffloadEngine) -> None:
    changes = changes_between({}, read(engine))
    assert changes[INFO] == {
        "cpu_num_chunks": "4",
        "cpu_blocks_per_chunk": "1",
        "cpu_kv_cache_size_bytes": str(8 * SLOT),
        "cpu_kv_cache_size_tokens": "64",
    }
    assert changes["cpu_cache_usage_perc"] == 0


def test_a_store_and_a_load(engine: OffloadEngine) -> None:
    before = read(engine)
    op = engine.begin_store(KEYS[:3], [7, 8, 9]).op
    storing = read(engine)
    assert changes_between(before, storing) == {"cpu_cache_usage_perc": 0.75, "cpu_cache_write_usage_perc": 0.75}
    finish(engine, op, seconds=0.25)
    stored = read(engine)
    assert changes_between(storing, stored) == {
        "store_bytes": 3 * 2 * SLOT,  # of both ranks
        "store_time": 0.25,
        "cpu_cache_usage_perc": 0,
        "cpu_cache_write_usage_perc": 0,
    }
    op = engine.begin_load(engine.acquire(KEYS[:2]), [1, 2])
    finish(engine, op)
    assert changes_between(stored, read(engine)) == {"load_bytes": 2 * 2 * SLOT, "load_time": 0.5}


def test_a_hit_that_waits_counts_as_reading(engine: OffloadEngine) -> None:
    finish(engine, engine.begin_store(KEYS[:2], [7, 8]).op)
    engine.acquire(KEYS[:2])
    assert read(engine)["cpu_cache_read_usage_perc"] == 0.5


def test_an_abandoned_store_still_takes_room() -> None:
    clock = FakeClock()
    engine = OffloadEngine(EngineConfig(slot_bytes=SLOT, capacity_slots=4, transfer_timeout=1.0), clock=clock)
    make_ranks(engine)
    engine.begin_store(KEYS[:2], [7, 8])
    clock.advance(2.0)
    engine.tick()
    assert read(engine)["cpu_cache_write_usage_perc"] == 0.5


def test_blocks_without_room_are_allocation_failures(engine: OffloadEngine) -> None:
    before = read(engine)
    engine.begin_store(KEYS[:6], list(range(6)))
    assert changes_between(before, read(engine))["allocation_failure"] == 2


def test_a_resize_sends_the_configuration_again(engine: OffloadEngine) -> None:
    before = read(engine)
    assert engine.admin.resize(3).run().finished
    assert changes_between(before, read(engine))[INFO]["cpu_num_chunks"] == "3"


def test_several_groups_have_no_number_of_tokens(engine: OffloadEngine) -> None:
    assert read_family(engine.stats(), SLOT, None)[INFO]["cpu_kv_cache_size_tokens"] == "None"


def test_changes_add_up(engine: OffloadEngine) -> None:
    start = read(engine)
    sum_of_parts = changes_between({}, start)
    whole = dict(sum_of_parts)
    last = start
    for keys in (KEYS[:1], KEYS[1:3]):
        finish(engine, engine.begin_store(keys, list(range(len(keys)))).op)
        now = read(engine)
        merge(sum_of_parts, changes_between(last, now))
        last = now
    merge(whole, changes_between(start, last))
    assert sum_of_parts == whole


def test_observations_add_up() -> None:
    changes: Changes = {"store_size": [1.0]}
    merge(changes, {"store_size": [3.0, 2.0], "load_size": [4.0]})
    assert changes == {"store_size": [1.0, 3.0, 2.0], "load_size": [4.0]}


LOOKUP = "lookup_sync_delay_seconds"


def test_transfers_that_succeed_are_observed_with_their_size() -> None:
    host, request = VllmHost(num_ranks=2), FakeRequest("r", "abcdefgh")
    host.run(request)
    host.finish(request)
    host.step()
    host.side.settle()
    assert host.observed == [("store_size", 4 * 64)]
    again = FakeRequest("s", "abcdefghi")
    assert host.ask(again) == 8
    host.admit(again, load=8)
    host.step()
    host.side.settle()
    assert host.observed[-1] == ("load_size", 4 * 64)


def test_a_failed_transfer_is_not_observed() -> None:
    host, request = VllmHost(), FakeRequest("r", "abcdefgh")
    host.run(request)
    host.finish(request)
    (op,) = host.step(copy=False).stores.ops
    host.ranks[0].send(op.op_id, "failed")
    host.side.settle()
    assert host.observed == []


def test_each_look_up_is_observed_and_asking_again_is_none() -> None:
    host, request = VllmHost(), FakeRequest("r", "abcdefgh")
    host.store(*keys_of("abcdefgh"))
    assert host.ask(FakeRequest("short", "a")) == 0, "there is nothing to look up"
    for _ in range(3):
        assert host.ask(request) > 0
    ((name, seconds),) = host.observed
    assert name == LOOKUP
    assert 0 < seconds < 1
