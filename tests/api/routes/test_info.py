from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.doubles.fakes import FakeClock

from kvstow.control.engine import OffloadEngine

pytestmark = pytest.mark.anyio


async def test_info_says_what_runs(launch: Any, engine: OffloadEngine, clock: FakeClock) -> None:
    client = await launch(
        host_name="node-7", addresses=("http://127.0.0.1:9595",), settings={"slot_size": 4096}, build={"torch": "2.13"}
    )
    clock.advance(3.0)
    body = (await client.get("/v1/info")).json()
    assert body.pop("started").endswith("Z")
    assert body == {
        "name": "kvstow",
        "version": "1.2.3",
        "mode": "test",
        "node": False,
        "host_name": "node-7",
        "attach": None,
        "addresses": ["http://127.0.0.1:9595"],
        "engine_id": engine.engine_id,
        "uptime_seconds": 3.0,
        "token_required": False,
        "num_ranks": 2,
        "pools": ["host"],
        "build": {"torch": "2.13"},
        "settings": {"slot_size": 4096},
    }


async def test_info_tells_no_secret(launch: Any, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret")
    client: httpx.AsyncClient = await launch(token_file=token, agent_token="s3cret")
    answer = await client.get("/v1/info")
    assert answer.json()["token_required"] is True
    assert "s3cret" not in answer.text
    assert str(tmp_path) not in answer.text


async def test_info_tells_that_changes_need_a_certificate(launch: Any) -> None:
    client: httpx.AsyncClient = await launch(client_certificates=True)
    assert (await client.get("/v1/info")).json()["token_required"] is True
