"""The readiness of a node, and what its operator switches off."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.api.fakenode import RANKS, SLOTS, FakeNode
from tests.api.node.conftest import KEYS, NAMES, get
from tests.doubles.fakes import FakeClock

from kvstow.status import MemoryStatus

pytestmark = pytest.mark.anyio


async def test_readiness_says_what_memory_there_is(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.memory_status = MemoryStatus(4 << 20, 1 << 20)
    body = await get(client, "/v1/readiness")
    assert (body["state"], body["reason"]) == ("pinning", "1 MiB of 4 MiB of memory are populated")
    memory = body["memory"]
    assert (memory["target_bytes"], memory["populated_bytes"], memory["failure"]) == (4 << 20, 1 << 20, None)
    assert (await client.get("/readyz")).status_code == 200
    node.memory_status = MemoryStatus(4 << 20, 4 << 20)
    body = await get(client, "/v1/readiness")
    assert (body["state"], body["reason"]) == ("ready", "no engine has attached yet, so there is no pool")
    node.attach(NAMES[0])
    node.attach(NAMES[1])
    body = await get(client, "/v1/readiness")
    assert (body["state"], body["reason"]) == ("ready", "2 pools, 2 sessions")
    assert (body["usable_slots"], body["capacity_slots"], len(body["ranks"])) == (2 * SLOTS, 2 * SLOTS, 2 * RANKS)
    assert (await get(client, f"/v1/readiness?pool={NAMES[0]}"))["usable_slots"] == SLOTS


async def test_memory_that_cannot_be_had_fails_readyz(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.memory_status = MemoryStatus(4 << 20, 1 << 20, "the cgroup's limit is reached")
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert "[-]memory failed: the node has 1 MiB of 4 MiB of its memory: the cgroup's limit is reached" in answer.text
    body = await get(client, "/v1/readiness")
    assert (body["state"], body["reason"]) == ("degraded", "memory: the cgroup's limit is reached")


async def test_what_one_engine_does_fails_no_probe(client: httpx.AsyncClient, node: FakeNode, clock: FakeClock) -> None:
    stuck, fine = node.attach(NAMES[0]), node.attach(NAMES[1])
    stuck.begin_store(KEYS)
    clock.advance(1000.0)
    fine.report()
    for pool in node.shared.values():
        pool.tick()
    answer = await client.get("/readyz?verbose")
    assert answer.status_code == 200
    assert (
        f"[-]transfers failed: session s1 (fake, pool {NAMES[0]}) is stuck: its oldest transfer is 16m 40s old"
        in answer.text
    )
    assert (
        f"[-]ranks failed: pool {NAMES[0]}: rank 0 of session s1 (pid 1001 on node) has been silent for 16m 40s"
        in answer.text
    )
    assert "session s2" not in answer.text
    body = await get(client, "/v1/readiness")
    assert body["state"] == "degraded"
    assert body["reason"].startswith(f"pool {NAMES[0]}: session s1 (fake): a transfer is stuck")
    (first, second) = (await get(client, "/v1/sessions"))["items"]
    assert (first["state"], first["oldest_seconds"], second["state"]) == ("stuck", 1000.0, "attached")


async def test_a_lost_session_counts_in_no_check(client: httpx.AsyncClient, node: FakeNode, clock: FakeClock) -> None:
    node.attach(NAMES[0]).control.lose("it is gone")
    clock.advance(1000.0)
    lines = (await client.get("/readyz?verbose")).text.splitlines()
    assert not [line for line in lines if line.startswith("[-]")]
    assert (await get(client, "/v1/readiness"))["ranks"] == []
    (session,) = (await get(client, "/v1/sessions"))["items"]
    assert (session["state"], session["processes"]) == ("lost", 1)


async def test_engines_have_time_to_report(launch: Any, node: FakeNode, clock: FakeClock) -> None:
    client = await launch(directory=node, startup_grace=10.0)
    clock.advance(1000.0)
    node.attach(NAMES[0], reports=False)
    assert "[+]ranks ok" in (await client.get("/readyz?verbose")).text
    clock.advance(10.0)
    assert "rank 0 of session s1 has never reported" in (await client.get("/readyz?verbose")).text


async def test_required_checks_fail_readyz(launch: Any, node: FakeNode) -> None:
    client = await launch(directory=node, readiness_require=("pool", "pinned"))
    assert (await client.get("/readyz")).status_code == 200
    node.attach(NAMES[0], reports=False).pool.admin.start_resize(0).run()
    node.memory_status = MemoryStatus(2, 1)
    text = (await client.get("/readyz")).text
    assert f"[-]pool failed: pool {NAMES[0]}: no slot is usable yet" in text
    assert "[-]pinned failed: 1 B of 2 B of memory are populated" in text


async def test_records_that_are_wrong_fail_readyz(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.attach(NAMES[0]).pool.acceptance.integrity_error = "a slot is in two states"
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert f"pool {NAMES[0]}: its records are inconsistent" in answer.text


async def test_a_drain_is_of_the_node_or_of_one_pool(client: httpx.AsyncClient, node: FakeNode) -> None:
    _, other = [node.attach(name) for name in NAMES[:2]]
    assert (await client.put(f"/v1/drain?pool={NAMES[0]}", json={})).json()["active"] is True
    assert (await get(client, "/v1/drain"))["active"] is False
    assert (await get(client, f"/v1/drain?pool={NAMES[1]}"))["active"] is False
    assert (await client.get("/readyz")).status_code == 200
    other.begin_store(KEYS[:1])
    await client.put("/v1/drain", json={"mode": "stop_stores"})
    whole = await get(client, "/v1/drain")
    assert (whole["pending_transfers"], whole["drained"]) == (1, False), "what is in flight in any pool counts"
    node.attach(NAMES[2])
    assert {(await get(client, f"/v1/drain?pool={name}"))["mode"] for name in NAMES} == {"stop_stores"}
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert "the node drains (mode stop_stores)" in answer.text
    await client.delete("/v1/drain")
    assert not any([(await get(client, f"/v1/drain?pool={name}"))["active"] for name in NAMES])


async def test_a_bypass_is_of_the_node_or_of_one_pool(client: httpx.AsyncClient, node: FakeNode) -> None:
    for name in NAMES[:2]:
        node.attach(name)
    await client.put(f"/v1/bypass?pool={NAMES[0]}", json={"load": True})
    assert [(await get(client, f"/v1/bypass?pool={name}"))["load"] for name in NAMES[:2]] == [True, False]
    assert (await get(client, "/v1/bypass"))["load"] is False
    await client.put("/v1/bypass", json={"store": True})
    node.attach(NAMES[2])
    assert all([(await get(client, f"/v1/bypass?pool={name}"))["store"] for name in NAMES])
