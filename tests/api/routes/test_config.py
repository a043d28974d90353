from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvstow.control.engine import OffloadEngine

pytestmark = pytest.mark.anyio

CONFIG = "/v1/config"
SETTINGS = {"ranks": 2, "policy": "lru", "transfer_timeout": 30.0}


@pytest.fixture
async def configured(launch: Any, ranks: Any) -> httpx.AsyncClient:
    client: httpx.AsyncClient = await launch(settings=SETTINGS)
    return client


async def test_the_configuration_is_shown_with_its_etag(configured: httpx.AsyncClient) -> None:
    answer = await configured.get(CONFIG)
    assert answer.json() == {
        "etag": answer.headers["etag"],
        "runtime": {"capacity_slots": 16, "policy": "lru", "pinning_paused": False},
        "startup": SETTINGS,
    }


async def test_a_patch_changes_what_it_names(configured: httpx.AsyncClient, engine: OffloadEngine) -> None:
    answer = await configured.patch(CONFIG, json={"runtime": {"policy": "arc", "pinning_paused": True}})
    assert answer.json()["runtime"] == {"capacity_slots": 16, "policy": "arc", "pinning_paused": True}
    assert engine.desired().paused
    grown = await configured.patch(CONFIG, json={"runtime": {"capacity_slots": 20}}, params={"wait": 20})
    assert grown.json()["runtime"] == {"capacity_slots": 20, "policy": "arc", "pinning_paused": True}
    headers = {"Content-Type": "application/merge-patch+json"}
    merged = await configured.patch(CONFIG, content=b'{"runtime": {"pinning_paused": false}}', headers=headers)
    assert not merged.json()["runtime"]["pinning_paused"]


async def test_a_shrink_that_waits_goes_on_as_an_operation(
    configured: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys)
    lease = ranks.lease(keys)
    answer = await configured.patch(CONFIG, json={"runtime": {"capacity_slots": 4}}, params={"wait": 0})
    assert (answer.status_code, answer.json()["kind"]) == (202, "resize")
    engine.release(lease)
    ended = await configured.get(answer.headers["location"], params={"wait": 20})
    assert ended.json()["state"] == "succeeded"


async def test_a_dry_run_says_what_would_be_done(configured: httpx.AsyncClient, ranks: Any, keys: list[bytes]) -> None:
    ranks.store(keys)
    before = (await configured.get(CONFIG)).json()
    body = {"runtime": {"capacity_slots": 6, "pinning_paused": True}}
    assert (await configured.patch(CONFIG, json=body, params={"dry_run": True})).json() == {
        "dry_run": True,
        "capacity_slots": 6,
        "policy": "lru",
        "pinning_paused": True,
        "evicted_slots": 10,
        "evicted_bytes": 10 * 4096,
    }
    assert (await configured.get(CONFIG)).json() == before


async def test_what_needs_a_restart_is_a_conflict_that_says_so(configured: httpx.AsyncClient) -> None:
    answer = await configured.patch(CONFIG, json={"startup": {"ranks": 4}, "runtime": {"policy": "arc"}})
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert "startup.ranks" in answer.json()["detail"]
    assert "restart" in answer.json()["detail"]
    assert (await configured.get(CONFIG)).json()["runtime"]["policy"] == "lru"
    same = await configured.patch(CONFIG, json={"startup": {"ranks": 2}})
    assert same.status_code == 200


async def test_a_stale_etag_changes_nothing(configured: httpx.AsyncClient) -> None:
    etag = (await configured.get(CONFIG)).headers["etag"]
    match = {"If-Match": etag}
    changed = await configured.patch(CONFIG, json={"runtime": {"policy": "arc"}}, headers=match)
    assert changed.status_code == 200
    assert changed.headers["etag"] != etag
    for params in ({}, {"dry_run": "true"}):
        late = await configured.patch(CONFIG, json={"runtime": {"policy": "lru"}}, headers=match, params=params)
        assert (late.status_code, late.json()["code"]) == (412, "precondition_failed")
        assert late.json()["detail"].startswith(f"If-Match is {etag}; ")
        assert changed.headers["etag"] in late.json()["detail"]
    assert (await configured.get(CONFIG)).json()["runtime"]["policy"] == "arc"


@pytest.mark.parametrize(
    "body",
    [
        {"runtime": {"policy": "mru"}},
        {"runtime": {"capacity_slots": 33}},
        {"runtime": {"capacity_slots": 0}},
        {"runtime": {"capacity_bytes": 4096}},
        {"runtime": {"pinning_paused": 1}},
        {"runtime": None},
        {"startup": {"nonsense": 1}},
        {"policy": "arc"},
        [],
    ],
)
async def test_a_bad_patch_changes_nothing(configured: httpx.AsyncClient, body: Any) -> None:
    before = (await configured.get(CONFIG)).json()
    assert (await configured.patch(CONFIG, json=body)).status_code == 422
    assert (await configured.get(CONFIG)).json() == before


async def test_pinning_is_paused_by_a_patch_of_the_pool(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any
) -> None:
    paused = await client.patch("/v1/pools/host", json={"pinning_paused": True})
    assert (paused.status_code, paused.json()["pinning_paused"]) == (200, True)
    assert engine.desired().paused
    await client.patch("/v1/pools/host", json={"pinning_paused": False})
    assert not engine.desired().paused


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
    assert answer.json() == {"logger": "kvstow.api", "level": "debug", "ttl_seconds_left": None}
    assert logging.getLogger("kvstow.api").isEnabledFor(logging.DEBUG)
    items = (await client.get("/v1/loglevel")).json()["items"]
    assert answer.json() in items
    assert items[0]["logger"] == "kvstow"
    assert all(item["logger"].startswith("kvstow") for item in items)


async def test_a_level_for_a_time_goes_back(client: httpx.AsyncClient, eventually: Any) -> None:
    logging.getLogger("kvstow.api").setLevel("ERROR")
    body = {"logger": "kvstow.api", "level": "debug", "ttl_seconds": 600}
    assert 0 < (await client.put("/v1/loglevel", json=body)).json()["ttl_seconds_left"] <= 600
    await client.put("/v1/loglevel", json={**body, "level": "info", "ttl_seconds": 0.01})

    async def is_back() -> bool:
        return logging.getLogger("kvstow.api").level == logging.ERROR

    await eventually(is_back)


async def test_a_server_that_stops_puts_levels_back(client: httpx.AsyncClient, launch: Any) -> None:
    logging.getLogger("kvstow.api").setLevel("ERROR")
    apps: list[Any] = []
    await launch(apps.append)
    levels = apps[0].state.services.log_levels
    levels.set("kvstow.api", "debug", 600.0)
    levels.close()
    assert logging.getLogger("kvstow.api").level == logging.ERROR


@pytest.mark.parametrize(
    "body",
    [
        {"level": "trace"},
        {"level": "DEBUG"},
        {"logger": "root", "level": "info"},
        {"logger": "uvicorn", "level": "info"},
        {"logger": "kvstow.nothing.of.this.name", "level": "info"},
        {"logger": "", "level": "info"},
        {"level": "info", "ttl_seconds": 0},
        {"level": "info", "ttl_seconds": 86401},
        {"logger": "kvstow.api"},
    ],
)
async def test_a_bad_level_changes_nothing(client: httpx.AsyncClient, body: Any) -> None:
    before = (await client.get("/v1/loglevel")).json()
    assert (await client.put("/v1/loglevel", json=body)).status_code == 422
    assert (await client.get("/v1/loglevel")).json() == before


async def test_there_are_no_namespaces_and_the_answer_says_so(client: httpx.AsyncClient) -> None:
    for method, path in (("GET", ""), ("GET", "/a"), ("POST", ""), ("PUT", "/a/quota"), ("DELETE", "/a/quota")):
        answer = await client.request(method, f"/v1/namespaces{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
        assert "KVStow has no namespaces" in answer.json()["detail"]
