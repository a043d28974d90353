from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.api.conftest import CAPACITY, Launch
from tests.api.tieredhost import PART, URL, TieredHost

from kvstow.tier.blockstore import PartCounters

pytestmark = pytest.mark.anyio


@pytest.fixture
async def tiered(launch: Launch, tiered_host: TieredHost) -> httpx.AsyncClient:
    return await launch(directory=tiered_host.directory(2 * CAPACITY))


async def read(client: httpx.AsyncClient) -> Any:
    answer = await client.get("/v1/tier")
    assert answer.status_code == 200
    return answer.json()


async def test_a_host_without_a_tier_says_so(client: httpx.AsyncClient) -> None:
    assert await read(client) == {"store": None, "url": None, "items": [], "parts": []}


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("path", ["", "/attach", "/detach", "/bypass", "/purge", "/weights"])
async def test_nobody_changes_a_tier_over_the_api(tiered: httpx.AsyncClient, method: str, path: str) -> None:
    """A store is named when the service starts: an anonymous client could have all blocks sent elsewhere."""
    answer = await tiered.request(method, f"/v1/tier{path}", json={"url": "mooncake://me:1"})
    assert answer.status_code in (404, 405)


async def test_readiness_does_not_depend_on_the_tier(tiered: httpx.AsyncClient, tiered_host: TieredHost) -> None:
    async def readiness() -> Any:
        answer = await tiered.get("/v1/readiness")
        assert answer.status_code == 200
        return answer.json()

    before = await readiness()
    number = tiered_host.begin()
    assert [(one["state"], one["reason"]) for one in (await read(tiered))["items"]] == [("on", "")]
    tiered_host.change(number, state="off", reason="new weights")
    found = await readiness()
    assert [(one["state"], one["reason"]) for one in (await read(tiered))["items"]] == [("off", "new weights")]
    assert (found["state"], found["reason"]) == (before["state"], before["reason"])


async def test_the_figures_of_each_pool(tiered: httpx.AsyncClient, tiered_host: TieredHost) -> None:
    tiered_host.begin(read_seconds=0.5)
    counters = PartCounters(written_bytes=5, read_bytes=7, corrupt_blocks=2, timeouts=3, restarts=4)
    reason = "the memory cannot be registered"
    tiered_host.tiers.part = replace(PART, state="failed", reason=reason, counters=counters)
    view = await read(tiered)
    assert (view["store"], view["url"]) == ("memory", URL)
    (item,) = view["items"]
    assert (item["pool"], item["namespace"], item["model"], item["state"]) == ("host", "a1", "org/model", "on")
    assert (item["read_seconds"], item["prefill_tokens_per_second"]) == (0.5, None)
    assert item["decision"] == "no request has asked for a read yet"
    assert (item["counters"]["saved_seconds"], item["counters"]["hit_blocks"]) == (0.0, 0)
    (part,) = view["parts"]
    assert (part["name"], part["state"], part["reason"]) == (PART.name, "failed", reason)
    assert part["counters"] == {
        "read_blocks": 0,
        "read_bytes": 7,
        "written_blocks": 0,
        "written_bytes": 5,
        "corrupt_blocks": 2,
        "failed_blocks": 0,
        "refused_blocks": 0,
        "evicted_blocks": 0,
        "restarts": 4,
        "timeouts": 3,
    }
