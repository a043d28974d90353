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
    body = (await client.get("/v1/stats")).json()
    assert set(body) == {field.name for field in fields(EngineStats)}
    seconds = body["transfers"]["store"]["seconds"]
    assert (seconds["count"], seconds["sum"], len(seconds["counts"])) == (1, 0.001, len(seconds["bounds"]) + 1)
    assert body["lookups"]["hit_ratio"] == 0.75


async def test_a_ratio_of_nothing_is_null(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/stats")).json()["lookups"]["hit_ratio"] is None
