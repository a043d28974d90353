from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.doubles.fakes import FakeClock

from kvstow.control.engine import OffloadEngine
from kvstow.messages import Completion

pytestmark = pytest.mark.anyio


async def test_nothing_in_flight(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/transfers")).json()
    assert body["items"] == []
    assert {name: body["pending"][name] for name in ("loads", "stores", "load_bytes", "store_bytes")} == {
        "loads": 0,
        "stores": 0,
        "load_bytes": 0,
        "store_bytes": 0,
    }


async def test_transfers_are_shown_oldest_first(
    client: httpx.AsyncClient, engine: OffloadEngine, clock: FakeClock, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys[:2])
    store = ranks.begin_store(keys[2:5])
    clock.advance(1.0)
    load = engine.begin_load(engine.acquire(keys[:2]), [7, 8], request_id="r-load", choice="layer_alone")
    engine.complete(0, "boot-0", [Completion(store.op_id, "done")])
    body = (await client.get("/v1/transfers")).json()
    assert body["pending"] == {
        "loads": 1,
        "stores": 1,
        "load_blocks": 2,
        "store_blocks": 3,
        "load_bytes": 2 * 4096,
        "store_bytes": 3 * 4096,
        "oldest_seconds": 1.0,
        "stuck": 0,
    }
    assert {choice: count for choice, count in body["load_choices"].items() if count} == {"layer_alone": 1}
    assert body["items"] == [
        {
            "op_id": store.op_id,
            "session": engine.engine_id,
            "direction": "store",
            "state": "running",
            "blocks": 3,
            "bytes": 3 * 4096,
            "age_seconds": 1.0,
            "pending_ranks": [1],
            "idle_ranks": [],
            "failed": False,
            "request_id": "r-store",
            "pool": "host",
        },
        {
            "op_id": load.op_id,
            "session": engine.engine_id,
            "direction": "load",
            "state": "queued",
            "blocks": 2,
            "bytes": 2 * 4096,
            "age_seconds": 0.0,
            "pending_ranks": [0, 1],
            "idle_ranks": [],
            "failed": False,
            "request_id": "r-load",
            "pool": "host",
        },
    ]
    for direction, op in (("store", store), ("load", load)):
        chosen = (await client.get("/v1/transfers", params={"direction": direction})).json()
        assert [item["op_id"] for item in chosen["items"]] == [op.op_id]
        assert chosen["pending"] == body["pending"]
        narrowed = (await client.get("/v1/transfers", params={"state": "running", "direction": direction})).json()
        assert [item["op_id"] for item in narrowed["items"]] == [store.op_id][: direction == "store"]


async def test_the_list_has_a_limit(client: httpx.AsyncClient, ranks: Any, keys: list[bytes]) -> None:
    ops = [ranks.begin_store([key]) for key in keys[:3]]
    body = (await client.get("/v1/transfers", params={"slowest": 2, "direction": "store"})).json()
    assert [item["op_id"] for item in body["items"]] == [op.op_id for op in ops[:2]]
    assert body["pending"]["stores"] == 3
    assert len((await client.get("/v1/transfers", params={"slowest": 1})).json()["items"]) == 1
