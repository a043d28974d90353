from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families as parse_untyped
from tests.api.conftest import CAPACITY
from tests.api.tieredhost import TieredHost
from tests.doubles.fakes import FakeClock

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.tier.blockstore import PartCounters
from kvstow.tier.tierstatus import TierCounters
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.hostsettings import CertificateState

pytestmark = pytest.mark.anyio

Parse = Callable[[str], Iterable[Metric]]
parse: Parse = parse_untyped

FAMILIES = {
    "counter": """
        kvstow_loads_begun
        kvstow_transfers kvstow_transfer_blocks kvstow_transfer_bytes kvstow_transfer_busy_seconds kvstow_query_tokens
        kvstow_prefill_seconds_saved kvstow_prefill_tokens_saved kvstow_load_wait_seconds kvstow_loads_not_made
        kvstow_hit_tokens kvstow_miss_tokens kvstow_lookups kvstow_store_blocks kvstow_evicted_blocks
        kvstow_namespace_looked_up_blocks kvstow_namespace_hit_blocks
        kvstow_evicted_bytes kvstow_allocation_failures kvstow_hints_ignored kvstow_fallbacks kvstow_pin_failures
        kvstow_events_dropped
        kvstow_errors kvstow_rank_restarts kvstow_stale_reports kvstow_stale_completions
        kvstow_duplicate_completions
        kvstow_operations kvstow_http_requests kvstow_rejected_connections
        kvstow_node_keeper_restarts
    """,
    "gauge": """
        kvstow_transfers_inflight kvstow_transfer_inflight_bytes kvstow_transfers_stuck kvstow_transfer_oldest_seconds
        kvstow_pool_capacity_bytes kvstow_pool_pinned_bytes kvstow_pool_locked_bytes kvstow_pool_resident_bytes
        kvstow_pool_blocks kvstow_pool_capacity_blocks kvstow_pool_usable_blocks kvstow_pool_block_bytes kvstow_leases
        kvstow_pin_progress_ratio kvstow_pin_elapsed_seconds kvstow_pin_rate_bytes_per_second kvstow_pin_chunks
        kvstow_layer_read_bytes_per_second kvstow_layer_ways
        kvstow_ready kvstow_rank_ready kvstow_rank_heartbeat_timestamp_seconds kvstow_rank_pending_ops kvstow_state
        kvstow_pool_numa_bytes kvstow_transfer_queue_depth
        kvstow_health_check kvstow_operations_inflight kvstow_http_requests_inflight kvstow_build_info
        kvstow_node_populated_bytes kvstow_node_target_bytes kvstow_sessions kvstow_node_granted_bytes
        kvstow_node_used_bytes kvstow_node_recalled_bytes kvstow_node_orphaned_bytes kvstow_condition
        kvstow_node_keeper_up kvstow_pool_granted_bytes kvstow_pool_due_bytes
        kvstow_curve_hit_ratio kvstow_curve_requests kvstow_curve_useful_bytes
        kvstow_config_info kvstow_tls_certificate_expiry_timestamp_seconds
    """,
    "histogram": """
        kvstow_transfer_duration_seconds kvstow_transfer_size_bytes kvstow_transfer_queue_wait_seconds
        kvstow_lookup_duration_seconds kvstow_operation_duration_seconds kvstow_http_request_duration_seconds
        kvstow_event_loop_lag_seconds kvstow_block_lifetime_seconds kvstow_block_idle_before_evict_seconds
        kvstow_block_reuse_gap_seconds
    """,
}


async def scrape(client: httpx.AsyncClient) -> dict[str, Metric]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {family.name: family for family in parse(answer.text)}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """The one sample of this name with exactly these labels, and those of the pool if it has one."""
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and sample.labels in (labels, {"pool": "host", "model": "", **labels})
    ]
    assert len(found) == 1, (name, labels, found)
    return float(found[0])


def labels_of(families: dict[str, Metric]) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Of all families but those of HTTP requests, which have series only for what was asked, and of orphaned memory,
    which a thread measures."""
    return {
        (sample.name, frozenset(sample.labels.items()))
        for name, family in families.items()
        if not name.startswith(("kvstow_http_request", "kvstow_node_orphaned"))
        for sample in family.samples
    }


async def test_every_family_is_there_before_any_traffic(client: httpx.AsyncClient) -> None:
    families = await scrape(client)
    assert {(name, family.type) for name, family in families.items()} == {
        (name, kind) for kind, names in FAMILIES.items() for name in names.split()
    }
    assert all(family.documentation for family in families.values())
    empty = {name for name, family in families.items() if not family.samples}
    assert empty - {"kvstow_node_orphaned_bytes"} == {  # which a thread measures first
        "kvstow_pool_numa_bytes",  # only ranks know which nodes there are
        "kvstow_pin_rate_bytes_per_second",  # no rank has pinned anything
        "kvstow_layer_read_bytes_per_second",  # no rank has two ways for loads by layer
        "kvstow_layer_ways",
        "kvstow_rejected_connections",  # nobody connects to this engine
        "kvstow_curve_hit_ratio",  # there is no evidence yet
        "kvstow_curve_requests",
        "kvstow_curve_useful_bytes",
        "kvstow_node_keeper_up",  # it has no keeper
        "kvstow_node_keeper_restarts",
        "kvstow_http_requests",  # this is the first request
        "kvstow_http_request_duration_seconds",
        "kvstow_tls_certificate_expiry_timestamp_seconds",  # this server does not use TLS
    }


async def test_only_routes_that_were_requested_have_series(client: httpx.AsyncClient) -> None:
    for _ in range(2):
        await client.get("/livez")
    families = await scrape(client)
    requests = families["kvstow_http_requests"].samples
    assert [(sample.labels["route"], sample.value) for sample in requests] == [("/livez", 2.0)]
    durations = families["kvstow_http_request_duration_seconds"].samples
    assert {sample.labels["route"] for sample in durations} == {"/livez"}
    assert sum(len(family.samples) for family in families.values()) < 500


async def test_unknown_values_have_no_series(launch: Any, ranks: Any) -> None:
    engine = OffloadEngine(EngineConfig(slot_bytes=64, capacity_slots=4))
    client = await launch(directory=EmbeddedDirectory(engine, 4))
    families = await scrape(client)
    for name in ("query_tokens", "hit_tokens", "miss_tokens", "pin_rate_bytes_per_second"):
        assert families[f"kvstow_{name}"].samples == [], name
    assert (await client.get("/v1/pools/host")).json()["block_tokens"] is None
    assert (await client.get("/v1/ranks/0")).json()["pin_rate_bytes_per_second"] is None
    ranks.report(pin_rate_bytes_per_second=5.0)
    families = await scrape(await launch())
    assert value(families, "kvstow_pin_rate_bytes_per_second", rank="0", pool="host") == 5.0


async def test_both_ways_of_loads_by_layer_are_shown(launch: Any, ranks: Any) -> None:
    ranks.report(layer_way="engine", layer_kernel_bytes_per_second=27e9, layer_engine_bytes_per_second=45e9)
    families = await scrape(await launch())
    of = {"rank": "0", "pool": "host"}
    for way, rate, engines in (("kernel", 27e9, 0), ("engine", 45e9, 1)):
        assert value(families, "kvstow_layer_read_bytes_per_second", way=way, **of) == rate
        assert value(families, "kvstow_layer_ways", way=way, **of) == engines


async def test_traffic_adds_no_label(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes]
) -> None:
    before = labels_of(await scrape(client))
    ranks.store(keys[:4])
    engine.begin_load(engine.acquire(keys[:2]), [0, 1])
    await client.post("/v1/pools/host/evict", json={"slots": 1})
    await client.post("/v1/pools/host/evict", json={"slots": 0})
    await client.get("/v1/pools/other")
    await client.get("/nothing")
    assert labels_of(await scrape(client)) == before


async def test_the_capacity_of_a_rank_is_in_slots_of_its_own_size(launch: Any) -> None:
    config = EngineConfig(slot_bytes=64, capacity_slots=4, num_ranks=2, rank_slot_bytes=(64, 32))
    families = await scrape(await launch(directory=EmbeddedDirectory(OffloadEngine(config), 4)))
    name = "kvstow_pool_capacity_bytes"
    assert [value(families, name, pool="host", rank=rank) for rank in "01"] == [4 * 64, 4 * 32]


async def test_names_have_the_prefix_and_base_units(client: httpx.AsyncClient) -> None:
    text = (await client.get("/metrics")).text
    names = set(re.findall(r"^([a-z0-9_]+)[{ ]", text, re.MULTILINE))
    assert all(name.startswith("kvstow_") for name in names)
    assert not [name for name in names if name.endswith("_created")]
    assert not re.search(r"_(ms|milliseconds|mib|perc|percent)\b", text)


async def test_values_are_those_of_the_engine(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys[:3])
    ranks.begin_store(keys[3:5])
    lease = ranks.lease(keys[:1])
    engine.begin_load(engine.acquire([*keys[:2], b"absent"]), [7, 8])
    engine.acquire([b"absent"])
    engine.admin.evict(slots=1).run()
    families = await scrape(client)
    for state, count in {"free": 12, "filling": 2, "cached": 0, "leased": 2, "quarantined": 0}.items():
        assert value(families, "kvstow_pool_blocks", pool="host", state=state) == count
    assert value(families, "kvstow_transfers_total", direction="store", result="ok") == 1
    assert value(families, "kvstow_transfer_bytes_total", direction="store") == 3 * 4096
    assert value(families, "kvstow_transfers_inflight", direction="store") == 1
    assert value(families, "kvstow_transfer_inflight_bytes", direction="load") == 2 * 4096
    for result, count in {"full": 0, "partial": 1, "miss": 1}.items():
        assert value(families, "kvstow_lookups_total", result=result) == count
    assert value(families, "kvstow_lookup_duration_seconds_count") == 2
    assert value(families, "kvstow_evicted_blocks_total", pool="host", reason="operator") == 1
    assert value(families, "kvstow_query_tokens_total") == 4 * 16
    assert value(families, "kvstow_hit_tokens_total", source="host") == 2 * 16
    assert value(families, "kvstow_miss_tokens_total", reason="absent") == 2 * 16
    assert value(families, "kvstow_store_blocks_total", outcome="stored") == 3
    assert value(families, "kvstow_leases") == 1
    assert value(families, "kvstow_ready") == 1
    assert value(families, "kvstow_pin_progress_ratio", pool="host", rank="1") == 1
    engine.release_lease(lease)


async def test_histograms_are_cumulative(client: httpx.AsyncClient, ranks: Any, keys: list[bytes]) -> None:
    ranks.store(keys[:3])
    families = await scrape(client)
    labels = {"direction": "store"}
    assert value(families, "kvstow_transfer_duration_seconds_bucket", **labels, le="0.0003") == 0
    assert value(families, "kvstow_transfer_duration_seconds_bucket", **labels, le="0.001") == 1
    assert value(families, "kvstow_transfer_duration_seconds_bucket", **labels, le="+Inf") == 1
    assert value(families, "kvstow_transfer_duration_seconds_count", **labels) == 1
    assert value(families, "kvstow_transfer_duration_seconds_sum", **labels) == 0.001


async def test_states_and_checks_follow_the_engine(
    client: httpx.AsyncClient, engine: OffloadEngine, clock: FakeClock, ranks: Any
) -> None:
    ranks.engine.report(ranks.make_report(1, state="degraded", error_reason="memlock", chunks_failed=1, chunks_total=4))
    families = await scrape(client)
    assert value(families, "kvstow_ready") == 0
    assert value(families, "kvstow_state", state="degraded") == 1
    assert sum(sample.value for sample in families["kvstow_state"].samples) == 1
    assert value(families, "kvstow_rank_ready", rank="0") == 1
    assert value(families, "kvstow_rank_ready", rank="1") == 0
    assert value(families, "kvstow_health_check", check="ranks", probe="readyz") == 0
    assert value(families, "kvstow_health_check", check="server", probe="livez") == 1
    assert value(families, "kvstow_pin_chunks", pool="host", rank="1", state="failed") == 1
    assert value(families, "kvstow_pin_chunks", pool="host", rank="1", state="pending") == 3


async def test_ages_are_those_of_evicted_and_reused_blocks(
    client: httpx.AsyncClient, engine: OffloadEngine, clock: FakeClock, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys)
    clock.advance(50.0)
    engine.release_lease(engine.acquire(keys))
    clock.advance(5.0)
    ranks.store([b"another"])
    families = await scrape(client)
    for name, seconds in {"reuse_gap": 50.0, "lifetime": 55.0, "idle_before_evict": 5.0}.items():
        assert value(families, f"kvstow_block_{name}_seconds_sum", pool="host") == seconds
        assert value(families, f"kvstow_block_{name}_seconds_count", pool="host") == 1


async def test_fallbacks_and_allocation_failures_are_counted(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes]
) -> None:
    engine.admin.set_bypass(load=True, store=False, ttl_seconds=None)
    engine.acquire(keys)
    engine.begin_store([*keys, b"another"], range(17))
    families = await scrape(client)
    assert value(families, "kvstow_fallbacks_total", reason="bypassed") == 1
    assert value(families, "kvstow_fallbacks_total", reason="load_failed") == 0
    assert value(families, "kvstow_allocation_failures_total", pool="host") == 1


async def test_a_heartbeat_is_0_until_the_rank_reports(client: httpx.AsyncClient, engine: OffloadEngine) -> None:
    assert value(await scrape(client), "kvstow_rank_heartbeat_timestamp_seconds", rank="0") == 0
    assert value(await scrape(client), "kvstow_rank_ready", rank="0") == 0


async def test_a_heartbeat_is_the_time_of_the_last_report(
    client: httpx.AsyncClient, ranks: Any, clock: FakeClock
) -> None:
    clock.advance(1000.0)
    age = time.time() - value(await scrape(client), "kvstow_rank_heartbeat_timestamp_seconds", rank="0")
    assert 999.0 < age < 1100.0


async def test_an_error_names_the_failed_component(client: httpx.AsyncClient, engine: OffloadEngine) -> None:
    for code in ("admin_server", "rank_report", "rank_report"):
        engine.count_error(code)
    families = await scrape(client)
    assert value(families, "kvstow_errors_total", component="admin_server", code="admin_server") == 1
    assert value(families, "kvstow_errors_total", component="connector", code="rank_report") == 2
    assert value(families, "kvstow_errors_total", component="engine", code="integrity") == 0


async def test_operations_are_counted(client: httpx.AsyncClient, ranks: Any) -> None:
    await client.post("/v1/pools/host/evict", json={"slots": 1})
    families = await scrape(client)
    assert value(families, "kvstow_operations_total", kind="evict", result="succeeded") == 1
    assert value(families, "kvstow_operation_duration_seconds_count", kind="evict") == 1
    assert value(families, "kvstow_operations_inflight", kind="evict") == 0


async def test_all_families_of_a_pool_have_its_name_and_model(launch: Any, engine: OffloadEngine) -> None:
    directory = EmbeddedDirectory(engine, 16, model="llama")
    families = await scrape(await launch(directory=directory))
    labelled = {
        name for name, family in families.items() for sample in family.samples if {"pool", "model"} & set(sample.labels)
    }
    assert len(labelled) > 35
    for name in labelled:
        for sample in families[name].samples:
            assert (sample.labels["pool"], sample.labels["model"]) == ("host", "llama"), sample
    (sample,) = families["kvstow_config_info"].samples
    assert (sample.labels["policy"], sample.value) == ("auto", 1)


async def test_the_expiry_of_the_certificate_is_current(launch: Any) -> None:
    ends = [2e9]
    client = await launch(certificate=lambda: CertificateState(ends[-1]))
    for moment in (2e9, 3e9):
        ends.append(moment)
        assert value(await scrape(client), "kvstow_tls_certificate_expiry_timestamp_seconds") == moment


async def test_metrics_go_to_the_registry_of_the_host(launch: Any) -> None:
    registry = CollectorRegistry()
    await launch(registry=registry, build={"vllm": "0.33"})
    facts = registry.get_sample_value(
        "kvstow_build_info",
        {"version": "1.2.3", "mode": "test", "vllm": "0.33", "python": ".".join(map(str, sys.version_info[:3]))},
    )
    assert facts == 1


SCRAPE = """
from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow_api.app import create_app
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.host import ApiHost
from prometheus_client import REGISTRY, generate_latest

engine = OffloadEngine(EngineConfig(slot_bytes=64, capacity_slots=4))
context = ApiHost(directory=EmbeddedDirectory(engine, 4), version="1", mode="test")
create_app(context)
print(generate_latest(context.registry).decode())
assert b"kvstow" not in generate_latest(REGISTRY), "the host's own"
"""


def test_nothing_leaks_into_the_multiprocess_directory_of_a_host(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRAPE], env=environment, capture_output=True, text=True, check=True)
    assert "kvstow_pool_blocks" in done.stdout
    assert list(tmp_path.iterdir()) == []


# -- the store below the pools ---------------------------------------------------------------------------------------

TIER_GAUGES = "up writing_blocks reading_blocks stuck_slots prefill_tokens_per_second"
TIER_COUNTERS = """
    requests declined_requests cut_waits wait_seconds saved_seconds found_blocks read_blocks hit_blocks
    prefetched_blocks written_blocks postponed_blocks failed_blocks
"""
PART_GAUGES = "up queued_bytes read_bytes_per_second"
PART_COUNTERS = "bytes corrupt_blocks failed_blocks refused_blocks restarts timeouts"
TIER_LABELS = {"tier": "memory", "pool": "host", "model": "org/model"}
PART_LABELS = {"tier": "memory", "part": "transfers of the node"}


def of_pools(families: dict[str, Metric]) -> dict[str, Metric]:
    return {
        name: one
        for name, one in families.items()
        if name.startswith("kvstow_tier_") and not name.startswith("kvstow_tier_part_")
    }


async def test_a_store_has_families_while_engines_use_it(
    launch: Any, engine: OffloadEngine, tiered_host: TieredHost
) -> None:
    client = await launch(directory=tiered_host.directory(2 * CAPACITY))
    assert not of_pools(await scrape(client))
    number = tiered_host.begin()
    families = of_pools(await scrape(client))
    assert {(name, family.type) for name, family in families.items()} == {
        *((f"kvstow_tier_{name}", "gauge") for name in TIER_GAUGES.split()),
        *((f"kvstow_tier_{name}", "counter") for name in TIER_COUNTERS.split()),
    }
    for family in families.values():
        assert family.documentation
        for sample in family.samples:
            assert sample.labels.items() >= TIER_LABELS.items()
            assert sample.labels.keys() - TIER_LABELS.keys() <= {"direction"}
    empty = {name.removeprefix("kvstow_tier_") for name, family in families.items() if not family.samples}
    assert empty == {"prefill_tokens_per_second"}, "not measured yet"
    tiered_host.change(number, prefill_tokens_per_second=10_000.0)
    measured = await scrape(client)
    assert value(measured, "kvstow_tier_prefill_tokens_per_second", **TIER_LABELS) == pytest.approx(10_000)
    tiered_host.close()
    assert not of_pools(await scrape(client))


async def test_the_figures_of_a_store(launch: Any, engine: OffloadEngine, tiered_host: TieredHost) -> None:
    client = await launch(directory=tiered_host.directory(2 * CAPACITY))
    counted = TierCounters(wait_seconds=1.5, saved_seconds=2.5, failed_write_blocks=3, failed_read_blocks=4)
    number = tiered_host.begin(counters=counted)

    async def expect(**wanted: float) -> None:
        families = await scrape(client)
        for name, figure in wanted.items():
            assert value(families, f"kvstow_tier_{name}", **TIER_LABELS) == figure, name

    await expect(up=1, wait_seconds_total=1.5, saved_seconds_total=2.5)
    families = await scrape(client)
    assert value(families, "kvstow_tier_failed_blocks_total", direction="write", **TIER_LABELS) == 3
    assert value(families, "kvstow_tier_failed_blocks_total", direction="read", **TIER_LABELS) == 4
    for state in ("down", "off"):
        tiered_host.change(number, state=state)
        await expect(up=0)


async def test_the_parts_of_a_store_have_figures_of_their_own(
    launch: Any, engine: OffloadEngine, tiered_host: TieredHost
) -> None:
    client = await launch(directory=tiered_host.directory(2 * CAPACITY))
    families = {name: one for name, one in (await scrape(client)).items() if name.startswith("kvstow_tier_part_")}
    assert {(name, family.type) for name, family in families.items()} == {
        *((f"kvstow_tier_part_{name}", "gauge") for name in PART_GAUGES.split()),
        *((f"kvstow_tier_part_{name}", "counter") for name in PART_COUNTERS.split()),
    }
    counters = PartCounters(read_bytes=1, written_bytes=2, corrupt_blocks=5, restarts=6)
    tiered_host.tiers.part = dataclasses.replace(tiered_host.tiers.part, state="stuck", counters=counters)
    found = await scrape(client)
    assert value(found, "kvstow_tier_part_up", **PART_LABELS) == 0
    assert value(found, "kvstow_tier_part_corrupt_blocks_total", **PART_LABELS) == 5
    assert value(found, "kvstow_tier_part_bytes_total", direction="write", **PART_LABELS) == 2


async def test_the_namespaces_of_a_pool_are_one_tier(
    launch: Any, engine: OffloadEngine, tiered_host: TieredHost
) -> None:
    client = await launch(directory=tiered_host.directory(2 * CAPACITY))
    first = tiered_host.begin(counters=TierCounters(written_blocks=3))
    second = tiered_host.begin(counters=TierCounters(written_blocks=4))
    families = await scrape(client)
    assert value(families, "kvstow_tier_written_blocks_total", **TIER_LABELS) == 7
    assert value(families, "kvstow_tier_up", **TIER_LABELS) == 1
    tiered_host.change(first, state="off")
    assert value(await scrape(client), "kvstow_tier_up", **TIER_LABELS) == 1, "the other one is in use"
    tiered_host.change(second, state="off")
    assert value(await scrape(client), "kvstow_tier_up", **TIER_LABELS) == 0


async def test_counters_of_a_tier_do_not_fall_when_a_namespace_ends(
    launch: Any, engine: OffloadEngine, tiered_host: TieredHost
) -> None:
    """Prometheus would take it for a restart, and count again what the others have counted."""
    client = await launch(directory=tiered_host.directory(2 * CAPACITY))
    for figure in (3, 4):
        counted = TierCounters(written_blocks=figure, failed_write_blocks=figure, saved_seconds=figure + 0.5)
        tiered_host.begin(counters=counted)

    def counters(families: dict[str, Metric]) -> dict[object, float]:
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in families.values()
            for sample in family.samples
            if family.name.startswith("kvstow_tier_") and family.type == "counter"
        }

    before = counters(await scrape(client))
    assert {3 + 4, 3.5 + 4.5} <= set(before.values())
    tiered_host.tiers.remove(0)
    assert counters(await scrape(client)) == before
