"""What holds for every route that reads."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from kvstow.control.engine import OffloadEngine
from kvstow_api.routes import ROUTERS

pytestmark = pytest.mark.anyio

# The stream of events does not end: test_events.py reads it.
PATHS = sorted(
    route.path  # type: ignore[attr-defined]
    for router in ROUTERS
    for route in router.routes
    if "GET" in route.methods and route.path != "/v1/events"  # type: ignore[attr-defined]
)
UNKNOWN_CONTEXT = "00" * 16
NOT_FOUND = ("/livez/loop", "/startupz/loop", f"/v1/contexts/{UNKNOWN_CONTEXT}")


async def test_reading_changes_nothing(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys[:4])
    ranks.lease(keys[:1])
    known = {
        "{pool}": "host",
        "{rank}": "0",
        "{key}": keys[0].hex(),
        "{operation_id}": "none",
        "{context}": UNKNOWN_CONTEXT,
        "{check}": "loop",
        "{rest:path}": "none",
    }
    before = (engine.stats(), engine.readiness(), engine.blocks(), engine.desired(), engine.admin.drain_status)
    for path in PATHS:
        for name, given in known.items():
            path = path.replace(name, given)
        answer = await client.get(path)
        assert answer.status_code in (200, 404), path
        assert (answer.status_code == 404) == (path.endswith("none") or path in NOT_FOUND), path
    after = (engine.stats(), engine.readiness(), engine.blocks(), engine.desired(), engine.admin.drain_status)
    assert after == before
