from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.doubles.fakes import FakeClock

from kvstow.control.engine import OffloadEngine

pytestmark = pytest.mark.anyio

OFF = {"load": False, "store": False, "ttl_seconds_left": None}


async def test_a_bypass_ends_by_itself(
    client: httpx.AsyncClient, engine: OffloadEngine, clock: FakeClock, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys[:1])
    assert (await client.get("/v1/bypass")).json() == OFF
    answer = await client.put("/v1/bypass", json={"load": True, "store": False, "ttl_seconds": 10})
    assert (answer.status_code, answer.json()) == (200, {"load": True, "store": False, "ttl_seconds_left": 10.0})
    assert engine.lookup(keys[:1]) == 0
    assert (await client.get("/readyz")).status_code == 200
    clock.advance(4.0)
    assert (await client.get("/v1/bypass")).json()["ttl_seconds_left"] == 6.0
    clock.advance(6.0)
    assert (await client.get("/v1/bypass")).json() == OFF
    assert engine.lookup(keys[:1]) == 1


async def test_a_bypass_is_replaced_as_a_whole(client: httpx.AsyncClient) -> None:
    await client.put("/v1/bypass", json={"load": True, "store": True})
    assert (await client.put("/v1/bypass", json={"store": True})).json() == {**OFF, "store": True}
    assert (await client.put("/v1/bypass", json={"load": False, "ttl_seconds": 5})).json() == OFF
