from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.doubles.fakes import FakeClock

from kvstow.control.engine import OffloadEngine

pytestmark = pytest.mark.anyio

OFF = {
    "active": False,
    "mode": None,
    "deadline_seconds_left": None,
    "drained": False,
    "pending_transfers": 0,
    "leases": 0,
}


async def test_a_drain_waits_for_what_is_in_flight(
    client: httpx.AsyncClient, engine: OffloadEngine, clock: FakeClock, ranks: Any, keys: list[bytes]
) -> None:
    assert (await client.get("/v1/drain")).json() == OFF
    op = ranks.begin_store(keys[:1])
    answer = await client.put("/v1/drain", json={"mode": "all", "deadline_seconds": 30})
    assert answer.status_code == 200
    assert answer.json() == {
        "active": True,
        "mode": "all",
        "deadline_seconds_left": 30.0,
        "drained": False,
        "pending_transfers": 1,
        "leases": 0,
    }
    assert (await client.get("/v1/readiness")).json()["state"] == "draining"
    clock.advance(10.0)
    ranks.finish(op)
    status = (await client.get("/v1/drain")).json()
    assert (status["drained"], status["deadline_seconds_left"]) == (True, 20.0)
    assert engine.lookup(keys[:1]) == 0
    ended = await client.delete("/v1/drain")
    assert (ended.status_code, ended.json()) == (200, OFF)
    assert engine.lookup(keys[:1]) == 1


@pytest.mark.parametrize("content", [None, {}])
async def test_without_words_a_drain_stops_all(client: httpx.AsyncClient, content: Any) -> None:
    body = (
        await client.put("/v1/drain", json=content) if content is not None else await client.put("/v1/drain")
    ).json()
    assert (body["mode"], body["deadline_seconds_left"]) == ("all", None)


async def test_stores_alone_can_be_stopped(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys[:1])
    assert (await client.put("/v1/drain", json={"mode": "stop_stores"})).json()["mode"] == "stop_stores"
    assert engine.lookup(keys[:1]) == 1
    assert engine.begin_store(keys[1:2], [0]).op is None
