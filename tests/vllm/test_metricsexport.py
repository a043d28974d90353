"""The family `vllm:kv_offload_*` in a real vLLM: its base classes, and the names that its dashboards know."""

from __future__ import annotations

import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import make_ranks

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.keys import chain_keys
from kvstow.messages import Completion, Op
from kvstow_service.connectors.engine_core.offloadmetrics import (
    ATTACH_STATE,
    ATTACHED,
    FAMILY,
    INFO,
    LOST_BLOCKS,
    PREFIX,
    SESSIONS_LOST,
    read_family,
)

pytestmark = pytest.mark.vllm

SLOT = 1 << 20
LABELS = {"model_name": "tiny", "engine": "0"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def prom(registry: CollectorRegistry) -> Any:
    from kvstow_service.connectors.engine_core.metricsexport import KVStowPromMetrics

    types: Any = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    return KVStowPromMetrics(config, types, list(LABELS), {0: ["tiny", "0"], 1: ["tiny", "1"]})


class Host:
    """An engine with one rank, and the feed of its statistics."""

    def __init__(self) -> None:
        from kvstow_service.connectors.engine_core.metricsexport import StatsFeed

        self.engine = OffloadEngine(EngineConfig(slot_bytes=SLOT, capacity_slots=4))
        (self.rank,) = make_ranks(self.engine)
        self.clock = FakeClock()
        self.feed = StatsFeed(
            lambda: read_family(self.engine.stats(), slot_bytes=2 * SLOT, slot_tokens=16),
            lambda: self.engine.open_transfers > 0,
            self.clock,
        )
        self._blocks = 0

    def store(self, count: int, seconds: float = 0.5) -> None:
        self.end(self.begin_store(count), seconds)

    def end(self, op: Op, seconds: float = 0.5) -> None:
        num_bytes = len(op.slots) * SLOT
        self.engine.complete(0, self.rank.boot_id, [Completion(op.op_id, "done", None, num_bytes, seconds)])
        self.feed.observe("store_size", num_bytes)

    def begin_store(self, count: int) -> Op:
        keys = list(chain_keys([self._blocks.to_bytes(4)] * count))
        self._blocks += count
        op = self.engine.begin_store(keys, range(count)).op
        assert op is not None
        return op

    def take(self) -> Any:
        self.clock.advance(1)
        return self.feed.take_stats()


@pytest.fixture
def host() -> Host:
    return Host()


def test_counters_are_read_ten_times_a_second_and_when_the_last_transfer_has_ended(host: Host) -> None:
    assert host.take() is not None
    take: Any = host.feed.take_stats
    first, second = host.begin_store(1), host.begin_store(1)
    host.end(first)
    assert take() is None, "it is too early"
    host.clock.advance(0.1)
    assert take().data["store_bytes"] == 2 * SLOT
    host.end(second)
    assert take().data["store_bytes"] == 2 * SLOT, "vLLM may make no more steps"
    assert take() is None
    host.store(1)
    assert take().data["store_bytes"] == 2 * SLOT, "it has begun and ended since the last call"
    assert take() is None


def test_stats_can_be_sent_between_processes(host: Host) -> None:
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    host.store(2)
    stats = host.take()
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert MsgpackDecoder().decode(MsgpackEncoder().encode(stats.data)) == stats.data


def test_stats_of_several_steps_add_up_and_are_reset(host: Host) -> None:
    stats = host.take()
    for count in (1, 2):
        host.store(count)
        assert stats.aggregate(host.take()) is stats
    assert stats.data["store_bytes"] == 3 * 2 * SLOT
    assert stats.data["store_size"] == [SLOT, 2 * SLOT]
    stats.reset()
    assert stats.is_empty()


def test_the_log_gets_numbers(host: Host) -> None:
    host.store(2, seconds=0.25)
    reduced = host.take().reduce()
    assert {"store_bytes": 4 * SLOT, "store_time": 0.25, "store_size_count": 1, "store_size_sum": 2 * SLOT}.items() <= (
        reduced.items()
    )
    assert all(isinstance(value, int | float) for value in reduced.values())


def test_vllm_writes_the_family(host: Host, prom: Any, registry: CollectorRegistry) -> None:
    host.store(3, seconds=0.25)
    prom.observe(host.take().data)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(PREFIX + name, LABELS | labels)

    assert value("store_bytes_total") == 3 * 2 * SLOT
    assert value("store_time_total") == 0.25
    assert value("store_size_sum") == 3 * SLOT
    assert value("store_size_bucket", le="4.194304e+06") == 1
    assert value("store_size_bucket", le="1.048576e+06") == 0
    assert value("cpu_cache_usage_perc") == 0
    info = {"cpu_num_chunks": "4", "cpu_blocks_per_chunk": "1"}
    info |= {"cpu_kv_cache_size_bytes": str(8 * SLOT), "cpu_kv_cache_size_tokens": "64"}
    assert value(INFO, **info) == 1
    host.engine.admin.resize(3).run()
    prom.observe(host.take().data)
    assert value(INFO, **info) == 0


def test_observations_without_other_changes_are_sent(host: Host) -> None:
    host.take()
    host.feed.observe("lookup_sync_delay_seconds", 1e-5)
    assert host.take().data == {"lookup_sync_delay_seconds": [1e-5]}
    assert host.take() is None


def test_each_engine_has_series_of_its_own(host: Host, prom: Any, registry: CollectorRegistry) -> None:
    host.store(1)
    prom.observe(host.take().data, engine_idx=1)
    assert registry.get_sample_value(f"{PREFIX}store_bytes_total", LABELS | {"engine": "1"}) == 2 * SLOT


def test_only_the_family_is_registered(host: Host, prom: Any, registry: CollectorRegistry) -> None:
    prom.observe(host.take().data)
    assert {metric.name for metric in registry.collect()} == {PREFIX + name for name in FAMILY}


def test_counters_exist_before_their_first_increment(host: Host, prom: Any, registry: CollectorRegistry) -> None:
    prom.observe(host.take().data)
    assert registry.get_sample_value(f"{PREFIX}load_bytes_total", LABELS) == 0


@pytest.mark.usefixtures("own_log")
def test_another_connector_keeps_the_names_that_it_has_registered(
    host: Host, prom: Any, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = Counter(f"{PREFIX}load_bytes", "Of OffloadingConnector", registry=registry)
    prom.observe(host.take().data)
    host.store(1)
    prom.observe(host.take().data)
    assert [metric.name for metric in registry.collect()] == [metric.name for metric in theirs.collect()]
    assert len([record for record in caplog.records if "another connector" in record.message]) == 1


def test_names_types_and_labels_are_those_of_vllm() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics as theirs
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    known = theirs.get_connector_metric_definitions() | CPUOffloadingSpec.build_metric_definitions({})
    for name, metric in FAMILY.items():
        if name in (
            INFO,
            ATTACHED,
            ATTACH_STATE,
            SESSIONS_LOST,
            LOST_BLOCKS,
        ):  # vLLM 0.33 has the first; the others are of attached engines
            continue
        assert type(known[PREFIX + name]).__name__ == f"Offloading{metric.kind.title()}Metadata", name
        assert metric.labelnames == (), name


@pytest.mark.parametrize("first", ["KVStowConnector", "OffloadingConnector"])
def test_beside_an_offloading_connector_metrics_of_the_same_name_are_its_own(
    host: Host, registry: CollectorRegistry, first: str
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    children: list[dict[str, Any]] = [
        {"kv_connector": "KVStowConnector", "kv_connector_module_path": "kvstow_service.connectors.vllm"},
        {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": SLOT}},
    ]
    children.sort(key=lambda child: child["kv_connector"] != first)
    transfer = SimpleNamespace(
        kv_connector_extra_config={"connectors": [child | {"kv_role": "kv_both"} for child in children]},
        engine_id="engine",
    )
    types: Any = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    prom = MultiConnector.build_prom_metrics(config, types, list(LABELS), {0: ["tiny", "0"]})
    host.store(1)
    prom.observe({"KVStowConnector": host.take().data}, 0)
    assert registry.get_sample_value(f"{PREFIX}store_bytes_total", LABELS) is None
    assert f"{PREFIX}store_bytes" in {metric.name for metric in registry.collect()}
