from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvstow.control.engine import OffloadEngine

pytestmark = pytest.mark.anyio

CONFIG = "/v1/config"
SETTINGS = {"ranks": 2, "policy": "auto", "transfer_timeout": 30.0}


@pytest.fixture
async def configured(launch: Any, ranks: Any) -> httpx.AsyncClient:
    client: httpx.AsyncClient = await launch(settings=SETTINGS)
    return client


async def test_the_configuration_is_shown_with_its_etag(configured: httpx.AsyncClient) -> None:
    answer = await configured.get(CONFIG)
    assert answer.json() == {
        "pool": "host",
        "etag": answer.headers["etag"],
        "runtime": {"capacity_slots": 16, "policy": "auto", "pinning_paused": False},
        "startup": SETTINGS,
    }


async def test_the_configuration_follows_a_patch_of_the_pool(
    configured: httpx.AsyncClient, engine: OffloadEngine
) -> None:
    before = (await configured.get(CONFIG)).json()
    changed = await configured.patch("/v1/pools/host", json={"policy": "lru", "pinning_paused": True})
    after = (await configured.get(CONFIG)).json()
    assert after["runtime"] == {"capacity_slots": 16, "policy": "lru", "pinning_paused": True}
    assert after["etag"] == changed.headers["etag"] != before["etag"]
    assert engine.desired().paused


async def test_the_configuration_itself_takes_no_patch(configured: httpx.AsyncClient) -> None:
    answer = await configured.patch(CONFIG, json={"runtime": {"policy": "lru"}})
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")


# -- levels of the log ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    names = ("kvstow", "kvstow.api", "kvstow.audit")
    before = [logging.getLogger(name).level for name in names]
    yield
    for name, level in zip(names, before, strict=True):
        logging.getLogger(name).setLevel(level)


async def test_levels_are_shown_and_set(client: httpx.AsyncClient) -> None:
    answer = await client.put("/v1/loglevel", json={"logger": "kvstow.api", "level": "debug"})
    assert answer.json() == {"logger": "kvstow.api", "level": "debug"}
    assert logging.getLogger("kvstow.api").isEnabledFor(logging.DEBUG)
    items = (await client.get("/v1/loglevel")).json()["items"]
    assert answer.json() in items
    assert items[0]["logger"] == "kvstow"
    assert all(item["logger"].startswith("kvstow") for item in items)


@pytest.mark.parametrize(
    "body",
    [
        {"level": "trace"},
        {"level": "DEBUG"},
        {"logger": "root", "level": "info"},
        {"logger": "uvicorn", "level": "info"},
        {"logger": "kvstow.nothing.of.this.name", "level": "info"},
        {"logger": "", "level": "info"},
        {"level": "info", "ttl_seconds": 60},
        {"logger": "kvstow.api"},
    ],
)
async def test_a_bad_level_changes_nothing(client: httpx.AsyncClient, body: Any) -> None:
    before = (await client.get("/v1/loglevel")).json()
    assert (await client.put("/v1/loglevel", json=body)).status_code == 422
    assert (await client.get("/v1/loglevel")).json() == before
