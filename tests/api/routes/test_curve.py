"""The curve of a pool: embedded and of a node."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx
import pytest
from tests.api.conftest import CAPACITY, RANKS, SLOT_BYTES
from tests.api.fakenode import FakeNode
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import use_keys

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow_api.directory import EmbeddedDirectory

pytestmark = pytest.mark.anyio

LOOP = [hashlib.sha256(bytes([number])).digest() for number in range(CAPACITY + CAPACITY // 2)]
"""More blocks than the pool has, used one after another: without a larger pool, none of them hits in the order of last
use."""


def use_loop(session: Any, requests: int) -> None:
    for number in range(requests):
        use_keys(session, [LOOP[number % len(LOOP)]])
    session.pool.tick()


async def test_nothing_is_said_before_there_is_evidence(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any
) -> None:
    body = (await client.get("/v1/pools/host/curve")).json()
    assert body["advice"] == f"too early to tell: the pool has seen 0 of {CAPACITY} distinct blocks that fill it"
    use_loop(engine, 100)
    body = (await client.get("/v1/pools/host/curve")).json()
    assert (body["items"], body["next_useful"], body["enough"], body["everything"]) == ([], None, None, None)
    needed = 4 * CAPACITY
    begun = 100 - CAPACITY
    assert body["advice"].startswith(
        f"too early to tell: since the pool was full, {begun} of 160 requests have begun, and they have looked up "
        f"{min(begun, needed)} of {needed} blocks"
    )
    assert (body["num_slots"], body["num_bytes"]) == (CAPACITY, CAPACITY * SLOT_BYTES * RANKS)
    doctor = (await client.get("/v1/doctor")).json()
    assert doctor["skipped"]["pool_size"] == body["advice"]
    assert "pool_size" not in {one["name"] for one in doctor["conditions"]}


async def test_the_curve_has_sizes_shares_and_what_follows(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any
) -> None:
    engine.admin.set_policy("lru")
    use_loop(engine, 400)
    body = (await client.get("/v1/pools/host/curve")).json()
    assert [size["num_slots"] for size in body["items"]] == [CAPACITY * 2**number // 8 for number in range(9)]
    assert [size["num_bytes"] for size in body["items"]][3] == CAPACITY * SLOT_BYTES * RANKS
    assert [size["times"] for size in body["items"]] == [0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32]
    assert [size["ratio"] for size in body["items"]][:4] == [0.0] * 4
    assert body["next_useful"]["num_slots"] == 2 * CAPACITY
    assert body["end"] == body["next_useful"]
    assert body["items"][4]["ratio"] > 0.85
    assert body["requests"] >= 300
    assert body["advice"].startswith("twice the memory (256 KiB) would add ")
    assert f"{body['requests']:,} requests" in body["advice"]
    assert body["saved_seconds_per_hour"] is None
    doctor = (await client.get("/v1/doctor")).json()
    (told,) = [one for one in doctor["conditions"] if one["name"] == "pool_size"]
    assert (told["what"], told["severity"], doctor["healthy"]) == (body["advice"], "info", True)
    readiness = (await client.get("/v1/readiness")).json()
    assert body["advice"] in [one["what"] for one in readiness["conditions"]]


async def test_a_sentence_stays_until_it_has_changed(launch: Any, engine: OffloadEngine, ranks: Any) -> None:
    """By two points, or for ten minutes: not with every request."""
    client = await launch()
    sampler = launch.state.sampler
    engine.admin.set_policy("lru")
    use_loop(engine, 12 * len(LOOP))  # fewer than a window has, so that the next ones change it
    sampler.tick()
    body = (await client.get("/v1/pools/host/curve")).json()
    assert f"{body['requests']:,} requests" in body["advice"]
    use_loop(engine, 40)
    sampler.tick()
    assert (await client.get("/v1/pools/host/curve")).json() == body
    statement = sampler.of_pool("host").statement
    assert statement is not None
    key, figures, time = statement.key, statement.figures, statement.time
    assert not statement.is_outdated(key, [one + 0.019 for one in figures], time + 599.0)
    assert statement.is_outdated(key, [one + 0.021 for one in figures], time)
    assert statement.is_outdated(key, figures, time + 600.0)
    assert statement.is_outdated(key._replace(policy="auto"), figures, time)


async def test_a_pool_without_a_curve_says_so(launch: Any, clock: FakeClock) -> None:
    engine = OffloadEngine(EngineConfig(slot_bytes=SLOT_BYTES, capacity_slots=CAPACITY, curve=False), clock=clock)
    client = await launch(directory=EmbeddedDirectory(engine, CAPACITY))
    body = (await client.get("/v1/pools/host/curve")).json()
    assert (body["items"], body["advice"]) == ([], "the pool follows no curve: its setting `curve` is off")
    assert (await client.get("/v1/pools/other/curve")).status_code == 404


async def test_each_pool_of_a_node_has_its_own(launch: Any, clock: FakeClock) -> None:
    node = FakeNode(clock)
    node.shares_memory = True
    first, second = node.attach("a"), node.attach("b")
    use_loop(first.control, 400)
    use_loop(second.control, 10)
    client = await launch(directory=node)
    body = (await client.get("/v1/pools/a/curve")).json()
    assert body["pool"] == "a"
    assert body["items"][3]["num_bytes"] == 16 * SLOT_BYTES, "all ranks have the same memory"
    assert (await client.get("/v1/pools/b/curve")).json()["items"] == []
    (told,) = [one for one in (await client.get("/v1/doctor")).json()["conditions"] if one["name"] == "pool_size"]
    assert (told["pool"], told["what"]) == ("a", f"pool a: {body['advice']}")
    assert "`--memory`" in told["fix"]
