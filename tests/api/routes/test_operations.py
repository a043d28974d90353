from __future__ import annotations

from typing import Any

import httpx
import pytest

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


async def test_cancelling_what_has_ended_changes_nothing(client: httpx.AsyncClient, ranks: Any) -> None:
    await client.post("/v1/pools/host/evict", json={"slots": 1})
    (item,) = (await client.get("/v1/operations")).json()["items"]
    answer = await client.post(f"/v1/operations/{item['id']}/cancel")
    assert (answer.status_code, answer.json()) == (200, item)


async def test_an_unknown_operation_is_not_found(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/operations/evict-0")).status_code == 404
    assert (await client.post("/v1/operations/evict-0/cancel")).status_code == 404


@pytest.mark.parametrize("query", ["kind=pin", "state=done", "kid=evict"])
async def test_a_bad_choice_is_refused(client: httpx.AsyncClient, query: str) -> None:
    assert (await client.get(f"/v1/operations?{query}")).status_code == 422
