"""The admin API of a real node, with an engine that attaches over its socket."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.api.conftest import CALLER_UID, called_by
from tests.service.node.conftest import Engines, MakeWholeNode
from tests.service.node.rawengine import SLOT_BYTES, RawEngine, key_of
from tests.service.node.wholenode import EXTENT
from tests.waiting import eventually

from kvstow_api.app import create_app
from kvstow_api.host import ApiHost
from kvstow_service.node.attach.clients import REASONS
from kvstow_service.node.node import Node

pytestmark = pytest.mark.anyio

KEYS = [key_of(number) for number in range(8)]


@pytest.fixture
def node(make_whole_node: MakeWholeNode) -> Node:
    made = make_whole_node(extents=4)
    made.start()
    return made


@pytest.fixture
def engine(node: Node, engines: Engines) -> RawEngine:
    return engines(node)


@pytest.fixture
async def client(node: Node) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(ApiHost(directory=node, version="1", mode="node"))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(called_by(CALLER_UID, app)), base_url="http://kvstow") as made,
    ):
        yield made


async def scrape(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """By name and labels: first the pool and its model."""
    text = (await client.get("/metrics")).text
    return {
        (one.name, *(one.labels[key] for key in sorted(one.labels, key=lambda key: (key != "pool", key)))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


async def test_a_node_without_engines_answers(client: httpx.AsyncClient, node: Node) -> None:
    eventually(lambda: node.populator.status().populated_bytes == 4 * EXTENT)
    readiness = (await client.get("/v1/readiness")).json()
    assert (readiness["state"], readiness["ranks"]) == ("ready", [])
    memory = readiness["memory"]
    assert (memory["target_bytes"], memory["populated_bytes"], memory["failure"]) == (4 * EXTENT, 4 * EXTENT, None)
    assert (memory["granted_bytes"], memory["used_bytes"], memory["keeper"]) == (0, 0, None)
    assert (await client.get("/readyz")).text == "ok"
    assert (await scrape(client))["kvstow_node_populated_bytes",] == 4 * EXTENT
    assert (await client.get("/v1/stats")).status_code == 409


async def test_an_engine_is_seen_and_detached_and_its_pool_deleted(
    client: httpx.AsyncClient, engine: RawEngine, node: Node
) -> None:
    engine.store_all(KEYS)
    (session,) = (await client.get("/v1/sessions")).json()["items"]
    assert {name: session[name] for name in ("id", "engine", "model", "state", "in_flight")} == {
        "id": engine.welcome.session_id,
        "engine": "raw",
        "model": "org/Model-1",
        "state": "attached",
        "in_flight": 0,
    }
    assert (session["pool"], session["namespace"]) == (engine.welcome.pool, engine.welcome.namespace)
    assert [rank["pinned_slots"] > 0 for rank in session["ranks"]] == [True, True]
    (pool,) = (await client.get("/v1/pools")).json()["items"]
    assert (pool["name"], pool["slot_bytes"], pool["slots"]["cached"]) == (engine.welcome.pool, SLOT_BYTES, len(KEYS))
    (namespace,) = (await client.get("/v1/namespaces")).json()["items"]
    assert (namespace["weights_id"], namespace["weights_source"], namespace["blocks"]) == ("w", "snapshot", len(KEYS))
    path = f"/v1/pools/{pool['name']}"
    assert (await client.delete(path)).status_code == 409
    assert (await client.patch(path, json={"capacity_slots": 1})).status_code == 409
    assert (await client.delete(f"/v1/sessions/{session['id']}")).status_code == 202
    eventually(lambda: node.host.sessions()[0].state == "lost")


async def test_who_cannot_attach_is_counted(client: httpx.AsyncClient, node: Node) -> None:
    rejected = (await client.get("/v1/sessions")).json()["rejected"]
    assert set(rejected) == set(REASONS)
    assert not any(rejected.values())
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(node.settings.attach_path))
        stranger.sendall(b"\xff" * 64)
        eventually(lambda: sum(node.rejected.values()) == 1)
    rejected = (await client.get("/v1/sessions")).json()["rejected"]
    (reason,) = [reason for reason, count in rejected.items() if count]
    metrics = (await client.get("/metrics")).text
    assert f'kvstow_rejected_connections_total{{reason="{reason}"}} 1' in metrics
    assert metrics.count("kvstow_rejected_connections_total{") == len(REASONS), (
        "each reason has its series from the start"
    )


async def test_the_memory_of_a_node_is_exported(client: httpx.AsyncClient, engine: RawEngine, node: Node) -> None:
    engine.store_all(KEYS)
    (hosted,) = node.host.pools()
    eventually(lambda: hosted.granted_bytes == hosted.due_bytes == 4 * EXTENT)  # the row in use, and the next one
    (pool,) = (await client.get("/v1/pools")).json()["items"]
    assert (pool["granted_bytes"], pool["due_bytes"]) == (4 * EXTENT, 4 * EXTENT)
    labels = (pool["name"], "org/Model-1")
    expected = {
        ("kvstow_pool_granted_bytes", *labels): 4 * EXTENT,
        ("kvstow_pool_due_bytes", *labels): 4 * EXTENT,
        ("kvstow_node_granted_bytes",): 4 * EXTENT,
        ("kvstow_node_used_bytes",): len(KEYS) * 2 * SLOT_BYTES,
        ("kvstow_sessions", *labels, "attached"): 1,
    }
    series = await scrape(client)
    assert {name: series[name] for name in expected} == expected
    assert ("kvstow_node_keeper_up",) not in series
