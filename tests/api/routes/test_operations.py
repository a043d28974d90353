from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.api.conftest import pages

pytestmark = pytest.mark.anyio


async def test_operations_are_listed_newest_first_and_chosen(client: httpx.AsyncClient, ranks: Any) -> None:
    assert (await client.get("/v1/operations")).json() == {"items": [], "next_page_token": None}
    await client.post("/v1/pools/host/evict", json={"slots": 1})
    await client.post("/v1/pools/host/purge", json={"all": True})
    items = (await client.get("/v1/operations")).json()["items"]
    assert [item["kind"] for item in items] == ["purge", "evict"]
    assert {item["state"] for item in items} == {"succeeded"}
    for query, count in (("kind=evict", 1), ("kind=resize", 0), ("state=succeeded", 2), ("state=running", 0)):
        assert len((await client.get(f"/v1/operations?{query}")).json()["items"]) == count
    assert (await client.get(f"/v1/operations/{items[0]['id']}")).json() == items[0]


async def test_a_dry_run_can_be_told_from_the_real_thing(client: httpx.AsyncClient, ranks: Any) -> None:
    await client.post("/v1/pools/host/evict", json={"slots": 1, "dry_run": True}, params={"wait": 20})
    await client.post("/v1/pools/host/evict", json={"slots": 1}, params={"wait": 20})
    items = (await client.get("/v1/operations")).json()["items"]
    assert [item["dry_run"] for item in items] == [False, True]
    assert "dry run of evict in pool host succeeded" in (await client.get("/v1/overview")).text


async def test_an_unknown_operation_is_not_found(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/operations/evict-0")).status_code == 404
    assert (await client.post("/v1/operations/evict-0/cancel")).status_code == 404


async def test_operations_come_in_pages(client: httpx.AsyncClient, ranks: Any) -> None:
    for _ in range(5):
        await client.post("/v1/pools/host/evict", json={"slots": 1}, params={"wait": 20})
    everything = [item["id"] for item in (await client.get("/v1/operations")).json()["items"]]
    found = await pages(client, "/v1/operations", page_size=2)
    assert [item["id"] for page in found for item in page] == everything
    assert max(map(len, found)) <= 2
    assert (await client.get("/v1/operations?page_token=x")).status_code == 422
