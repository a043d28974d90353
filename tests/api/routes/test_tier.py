from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.api.conftest import CAPACITY, Launch
from tests.api.tieredhost import URL, TieredHost

from kvstow.tier.store import ClientHealth, ClientStats

pytestmark = pytest.mark.anyio


@pytest.fixture
async def tiered(launch: Launch, tiered_host: TieredHost) -> httpx.AsyncClient:
    return await launch(directory=tiered_host.directory(2 * CAPACITY))


async def read(client: httpx.AsyncClient) -> Any:
    answer = await client.get("/v1/tier")
    assert answer.status_code == 200
    return answer.json()


async def test_a_host_without_a_tier_says_so(client: httpx.AsyncClient) -> None:
    assert await read(client) == {"store": None, "url": None, "items": []}


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("path", ["", "/attach", "/detach", "/bypass", "/purge", "/weights"])
async def test_nobody_changes_a_tier_over_the_api(tiered: httpx.AsyncClient, method: str, path: str) -> None:
    """A store is named when the service starts: an anonymous client could have its files read, and all blocks sent to a
    store of its own."""
    answer = await tiered.request(method, f"/v1/tier{path}", json={"url": "redis://me:1?password_file=/etc/shadow"})
    assert answer.status_code in (404, 405)


async def test_readiness_does_not_depend_on_the_tier(tiered: httpx.AsyncClient, tiered_host: TieredHost) -> None:
    async def readiness() -> Any:
        answer = await tiered.get("/v1/readiness")
        assert answer.status_code == 200
        return answer.json()

    before = await readiness()
    tier = tiered_host.begin()
    assert [(one["state"], one["reason"]) for one in (await read(tiered))["items"]] == [("on", "")]
    tier.turn_off("new weights")
    found = await readiness()
    assert [(one["state"], one["reason"]) for one in (await read(tiered))["items"]] == [("off", "new weights")]
    assert (found["state"], found["reason"]) == (before["state"], before["reason"])


async def test_the_figures_of_each_pool(tiered: httpx.AsyncClient, tiered_host: TieredHost) -> None:
    tier = tiered_host.begin()
    tier.break_even.note_fetch(100, 0.5)
    tiered_host.tiers.stats = ClientStats(put_bytes=5, get_bytes=7, corrupt_objects=2, timeouts=3, restarts=4)
    tiered_host.tiers.health = ClientHealth("failed", "the memory cannot be registered")
    view = await read(tiered)
    assert (view["store"], view["url"]) == ("memory", URL)
    (item,) = view["items"]
    assert (item["pool"], item["namespace"], item["model"], item["state"]) == ("host", "a1", "org/model", "on")
    assert item["fetch_bytes_per_second"] == 100 * 4096 / 0.5
    assert (item["lookup_seconds"], item["breaker"]) == (None, "closed")
    assert item["decision"] == "no request has asked for a fetch yet"
    assert item["counters"]["saved_seconds"] == 0.0
    assert item["clients"] == [
        {
            "purpose": "transfers of rank 0",
            "health": {"state": "failed", "reason": "the memory cannot be registered"},
            "stats": {
                "put_objects": 0,
                "put_bytes": 5,
                "get_objects": 0,
                "get_bytes": 7,
                "corrupt_objects": 2,
                "timeouts": 3,
                "restarts": 4,
            },
        }
    ]
