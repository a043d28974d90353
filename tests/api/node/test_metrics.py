"""The metrics of a node."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_untyped
from tests.api.fakenode import RANKS, SLOT_BYTES, SLOTS, FakeNode
from tests.api.node.conftest import KEYS, NAMES, get
from tests.doubles.rank import use_keys

from kvstow.status import MemoryStatus
from kvstow_api.directory import OrphanedMemory

pytestmark = pytest.mark.anyio


parse: Any = parse_untyped
Families = dict[str, Any]


async def scrape(client: httpx.AsyncClient) -> Families:
    return {family.name: family for family in parse(await get(client, "/metrics"))}


def values(families: Families, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """By the values of these labels."""
    return {tuple(one.labels[label] for label in labels): one.value for one in families[name].samples}


async def test_metrics_of_pools_have_their_names(client: httpx.AsyncClient, node: FakeNode, pools: list[str]) -> None:
    node.memory_status = MemoryStatus(4 << 20, 1 << 20)
    node.count_error("log_line_dropped")
    if pools:
        node.attach(pools[0])  # a rank 0 more
    families = await scrape(client)
    samples = [(s.name, frozenset(s.labels.items())) for family in families.values() for s in family.samples]
    assert len(set(samples)) == len(samples), "no series is there twice"
    assert not [labels for _, labels in samples if "session" in dict(labels)], "sessions come and go"
    for name in ("kvstow_pool_usable_blocks", "kvstow_leases", "kvstow_transfers_stuck", "kvstow_config_info"):
        assert list(values(families, name, "pool", "model")) == [(pool, "org/model") for pool in pools], name
    for name in ("kvstow_rank_ready", "kvstow_pool_pinned_bytes", "kvstow_rank_pending_ops"):
        ranks = [(pool, "org/model", str(rank)) for pool in pools for rank in range(RANKS)]
        assert list(values(families, name, "pool", "model", "rank")) == ranks, name
    errors = [s for s in families["kvstow_errors"].samples if s.labels["code"] == "log_line_dropped"]
    assert [(s.labels["pool"], s.value) for s in errors] == [*((name, 0.0) for name in pools), ("", 1.0)]
    sessions = values(families, "kvstow_sessions", "pool", "state")
    assert {key: value for key, value in sessions.items() if value} == {
        (pool, "attached"): 2.0 if pool == pools[0] else 1.0 for pool in pools
    }
    assert len(sessions) == 4 * len(pools), "also states that no session is in"
    (state,) = [s.labels["state"] for s in families["kvstow_state"].samples if s.value]
    assert state == "pinning"


async def test_who_profits_is_told_by_namespace(client: httpx.AsyncClient, node: FakeNode) -> None:
    """An engine that resets its cache again and again counts where it has counted before, and leaves no series."""
    engine, gone = node.attach("first"), node.attach("second")
    engine.store(KEYS[:2])
    engine.control.release_lease(engine.control.acquire(KEYS[:4]))
    gone.store(KEYS[:1])
    gone.control.count_lookup(7, 5)
    for _ in range(3):
        engine.control.reset()
        engine.control.count_lookup(10, 1)
    node.end(gone)
    families = await scrape(client)
    labels = ("pool", "namespace")
    assert values(families, "kvstow_namespace_looked_up_blocks", *labels) == {("first", "first-keys"): 34}
    assert values(families, "kvstow_namespace_hit_blocks", *labels) == {("first", "first-keys"): 5}


async def test_figures_of_ranks_are_one_of_all_engines(client: httpx.AsyncClient, node: FakeNode) -> None:
    first, second = node.attach(NAMES[0]), node.attach(NAMES[0])
    first.report(queued_loads=3, pending_ops=4, pin_rate_bytes_per_second=None, chunks_total=2, numa_bytes={"0": 5})
    second.report(
        queued_loads=1,
        pending_ops=1,
        pin_rate_bytes_per_second=9.0,
        chunks_total=1,
        chunks_done=1,
        pinned_slots=4,
        pinned_bytes=4 * SLOT_BYTES,
        numa_bytes={"0": 7, "1": 1},
    )
    families = await scrape(client)
    rank = (NAMES[0], "0")

    def figure(name: str, **labels: str) -> float:
        return values(families, name, "pool", "rank", *labels)[(*rank, *labels.values())]

    assert figure("kvstow_pool_pinned_bytes") == 4 * SLOT_BYTES
    assert figure("kvstow_pin_progress_ratio") == 4 / SLOTS
    assert figure("kvstow_pin_rate_bytes_per_second") == 9.0
    assert figure("kvstow_rank_pending_ops") == 5
    assert figure("kvstow_transfer_queue_depth", direction="load") == 4
    assert figure("kvstow_pin_chunks", state="done") == 1
    assert figure("kvstow_pin_chunks", state="pending") == 2
    assert figure("kvstow_pool_numa_bytes", numa_node="0") == 7
    assert figure("kvstow_rank_ready") == 1
    second.report(state="degraded", error="no memory")
    families = await scrape(client)
    assert figure("kvstow_rank_ready") == 0
    second.control.lose("it ended")
    families = await scrape(client)
    assert figure("kvstow_rank_ready") == 1
    assert figure("kvstow_pool_pinned_bytes") == SLOTS * SLOT_BYTES


MEMORY = ("capacity", "pinned", "locked", "resident")


@pytest.mark.parametrize("shares_memory", [False, True])
async def test_memory_that_all_ranks_share_counts_once(
    client: httpx.AsyncClient, node: FakeNode, shares_memory: bool
) -> None:
    node.shares_memory = shares_memory
    everything = SLOTS * SLOT_BYTES
    engines = [node.attach("a") for _ in range(2)]
    for engine in engines:
        engine.report(locked_bytes=everything, resident_bytes=everything, numa_bytes={"0": everything})
    families = await scrape(client)
    copies = 1 if shares_memory else RANKS
    for name in MEMORY:
        found = values(families, f"kvstow_pool_{name}_bytes", "rank")
        assert found == {(str(rank),): everything for rank in range(copies)}, name
    assert values(families, "kvstow_pool_numa_bytes", "rank").keys() == {(str(rank),) for rank in range(copies)}
    assert len(values(families, "kvstow_pin_progress_ratio", "rank")) == RANKS
    engines[0].report_rank(1, pinned_bytes=SLOT_BYTES)
    families = await scrape(client)
    pinned = values(families, "kvstow_pool_pinned_bytes", "rank")
    assert pinned == ({("0",): SLOT_BYTES} if shares_memory else {("0",): everything, ("1",): SLOT_BYTES})


@pytest.mark.parametrize("shares_memory", [False, True])
async def test_a_shared_pool_without_engines_has_its_capacity(
    client: httpx.AsyncClient, node: FakeNode, shares_memory: bool
) -> None:
    node.shares_memory = shares_memory
    node.end(node.attach("a"))
    families = await scrape(client)
    capacity = values(families, "kvstow_pool_capacity_bytes", "rank")
    assert list(capacity) == [(str(rank),) for rank in range(1 if shares_memory else RANKS)]
    assert values(families, "kvstow_pool_pinned_bytes", "rank") == {}


async def test_counters_of_ranks_never_shrink_while_the_pool_lives(client: httpx.AsyncClient, node: FakeNode) -> None:
    def busy(families: Families) -> float:
        return values(families, "kvstow_transfer_busy_seconds", "pool", "rank", "direction")[NAMES[0], "1", "load"]

    def failed(families: Families) -> float:
        return values(families, "kvstow_pin_failures", "pool", "rank", "reason")[NAMES[0], "1", "driver"]

    first, second = node.attach(NAMES[0]), node.attach(NAMES[0])
    assert busy(await scrape(client)) == 0.0
    first.report(load_busy_seconds=3.0, pin_failures={"driver": 2})
    second.report(load_busy_seconds=1.0)
    assert (busy(await scrape(client)), failed(await scrape(client))) == (4.0, 2.0)
    node.end(first)
    assert (busy(await scrape(client)), failed(await scrape(client))) == (4.0, 2.0)
    second.report(load_busy_seconds=1.5)
    assert busy(await scrape(client)) == 4.5
    again = node.attach(NAMES[0], reports=False)  # the engine of `first`, with the boots and counters that it had
    again.control.name = first.session_id
    for rank in range(RANKS):
        again.report_rank(rank, boot_id=f"{first.session_id}-{rank}", load_busy_seconds=3.25)
    assert busy(await scrape(client)) == 4.75
    for engine in list(node.engines):
        node.end(engine)
    families = await scrape(client)
    assert busy(families) == 4.75
    assert families["kvstow_rank_ready"].samples == []


async def test_the_series_of_a_pool_end_with_it(client: httpx.AsyncClient, node: FakeNode) -> None:
    for name in NAMES[:2]:
        node.attach(name).store(KEYS)
        node.engines[-1].report(load_busy_seconds=2.0)
    stored, busy = ("kvstow_store_blocks", "pool", "outcome"), ("kvstow_transfer_busy_seconds", "pool", "direction")
    before = await scrape(client)
    node.end(node.engines[0])
    assert values(await scrape(client), *stored) == values(before, *stored), "a pool outlives its engines"
    await client.delete(f"/v1/pools/{NAMES[0]}")
    after = await scrape(client)
    left = {sample.labels["pool"] for family in after.values() for sample in family.samples if "pool" in sample.labels}
    assert left - {""} == {NAMES[1]}
    assert values(after, *stored)[NAMES[1], "stored"] == len(KEYS)
    node.attach(NAMES[0])
    again = await scrape(client)
    assert values(again, *stored)[NAMES[0], "stored"] == 0
    assert values(again, *busy)[NAMES[0], "load"] == 0


async def test_metrics_of_a_node_s_memory(launch: Any, node: FakeNode, eventually: Any) -> None:
    client = await launch(
        directory=node,
        orphaned_memory=lambda: [OrphanedMemory(1, "a", 1, 5), OrphanedMemory(2, "b", 1, 6)],
    )
    node.memory_status = MemoryStatus(
        target_bytes=40,
        populated_bytes=39,
        granted_bytes=38,
        used_bytes=37,
        recalled_bytes=36,
        keeper="connected",
        keeper_restarts=2,
    )
    node.rejected["identity"] = 2
    await launch.state.watch.look()
    families = await scrape(client)
    found = {
        name.removeprefix("kvstow_node_"): sample.value
        for name, family in families.items()
        if name.startswith("kvstow_node_")
        for sample in family.samples
        if not sample.labels
    }
    assert found == {
        "target_bytes": 40,
        "populated_bytes": 39,
        "granted_bytes": 38,
        "used_bytes": 37,
        "recalled_bytes": 36,
        "orphaned_bytes": 11,
        "keeper_up": 1,
        "keeper_restarts": 2,
    }
    assert values(families, "kvstow_rejected_connections", "reason") == {("identity",): 2, ("version",): 0}
    assert (await get(client, "/v1/readiness"))["memory"]["orphaned_bytes"] == 11
    node.memory_status = replace(node.memory_status, keeper="gone")
    assert values(await scrape(client), "kvstow_node_keeper_up") == {(): 0}


async def test_memory_that_cannot_be_measured_has_no_series(launch: Any, node: FakeNode, caplog: Any) -> None:
    def refuse() -> list[OrphanedMemory]:
        raise PermissionError("/proc cannot be read")

    client = await launch(directory=node, orphaned_memory=refuse)
    for _ in range(2):
        await launch.state.watch.look()
    assert (await scrape(client))["kvstow_node_orphaned_bytes"].samples == []
    assert (await get(client, "/v1/readiness"))["memory"]["orphaned_bytes"] is None
    assert caplog.text.count("measuring orphaned memory failed") == 1


async def test_a_curve_has_series_once_there_is_evidence(client: httpx.AsyncClient, node: FakeNode) -> None:
    engine = node.attach(NAMES[0])
    for number in range(100):
        use_keys(engine.control, [sha256(bytes([number % 24])).digest()])
    engine.control.pool.tick()
    before = await scrape(client)
    assert before["kvstow_curve_hit_ratio"].samples == before["kvstow_curve_useful_bytes"].samples == []
    for number in range(300):
        use_keys(engine.control, [sha256(bytes([number % 24])).digest()])
    engine.control.pool.tick()
    families = await scrape(client)
    ratios = values(families, "kvstow_curve_hit_ratio", "pool", "times")
    assert {times for _, times in ratios} == {"0.125", "0.25", "0.5", "1", "2", "4", "8", "16", "32"}
    assert ratios[NAMES[0], "1"] < 0.6 < 0.8 < ratios[NAMES[0], "2"]
    (useful,) = values(families, "kvstow_curve_useful_bytes", "pool").values()
    assert useful == 2 * SLOTS * SLOT_BYTES * RANKS
    (requests,) = values(families, "kvstow_curve_requests", "pool").values()
    assert requests >= 150
