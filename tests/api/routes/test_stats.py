from __future__ import annotations

from dataclasses import fields
from typing import Any

import httpx
import pytest

from kvstow.control.engine import OffloadEngine
from kvstow.stats import EngineStats

pytestmark = pytest.mark.anyio


async def test_stats_count_traffic(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys[:4])
    engine.release_lease(engine.acquire([*keys[:3], b"absent"]))
    engine.admin.evict(slots=1).run()
    body = (await client.get("/v1/stats")).json()
    assert set(body) == {field.name for field in fields(EngineStats)}
    assert body["pool"]["name"] == "host"
    assert body["state"] == "ready"
    assert sum(body["pool"]["slots"].values()) == body["pool"]["usable_slots"]
    store = body["transfers"]["store"]
    assert (store["ok"], store["error"], store["blocks"], store["bytes"]) == (1, 0, 4, 4 * 4096)
    assert (store["seconds"]["count"], store["seconds"]["sum"]) == (1, 0.001)
    assert len(store["seconds"]["counts"]) == len(store["seconds"]["bounds"]) + 1
    assert body["lookups"]["results"]["partial"] == 1
    assert body["lookups"]["hit_ratio"] == 0.75
    assert body["stores"]["stored"] == 4
    assert body["evictions"]["operator"] == 1
    assert body["faults"]["rank_restarts"] == 0


async def test_a_ratio_of_nothing_is_null(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/stats")).json()["lookups"]["hit_ratio"] is None
