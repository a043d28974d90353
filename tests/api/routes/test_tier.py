from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from tests.api.conftest import CAPACITY, Launch
from tests.api.tieredhost import TieredHost

from kvstow.control.engine import OffloadEngine
from kvstow.errors import TierUnavailableError
from kvstow.testing.fakes import FakeClock
from kvstow.tier.memorystore import MemoryLookups
from kvstow.tier.store import ClientHealth, ClientStats
from kvstow_api.embeddeddirectory import EmbeddedDirectory

pytestmark = pytest.mark.anyio


@pytest.fixture
async def tiered(launch: Launch, engine: OffloadEngine, tiered_host: TieredHost) -> httpx.AsyncClient:
    return await launch(directory=EmbeddedDirectory(engine, 2 * CAPACITY, tier=tiered_host.control))


async def read(client: httpx.AsyncClient) -> Any:
    answer = await client.get("/v1/tier")
    assert answer.status_code == 200
    return answer.json()


async def test_a_host_that_cannot_have_a_tier_says_so(client: httpx.AsyncClient) -> None:
    assert await read(client) == {
        "attachable": False,
        "store": None,
        "url": None,
        "write": None,
        "bypass": {"bypassed": False, "ttl_seconds_left": None},
        "items": [],
    }
    for method, path, body in (
        ("POST", "attach", {"url": "memory:"}),
        ("POST", "detach", None),
        ("PUT", "bypass", {"bypassed": True}),
        ("POST", "purge", {"fingerprint": "f"}),
        ("POST", "weights", {"weights_id": "w"}),
    ):
        answer = await client.request(method, f"/v1/tier/{path}", json=body)
        assert answer.status_code == 409, path
        assert answer.json()["detail"] == "this host cannot have a fleet tier"


async def test_readiness_names_the_tier_and_does_not_depend_on_it(
    tiered: httpx.AsyncClient, tiered_host: TieredHost
) -> None:
    async def readiness(query: str = "") -> Any:
        answer = await tiered.get(f"/v1/readiness{query}")
        assert answer.status_code == 200
        return answer.json()

    before = await readiness()
    assert before["tiers"] == []
    tier = tiered_host.begin()
    on = {"pool": "host", "namespace": "a1", "state": "on", "reason": ""}
    assert (await readiness())["tiers"] == (await readiness("?pool=host"))["tiers"] == [on]
    tier.reset("new weights")
    found = await readiness()
    assert found["tiers"] == [on | {"state": "off", "reason": "new weights"}]
    assert (found["state"], found["reason"]) == (before["state"], before["reason"])


async def test_a_store_is_attached_and_detached(tiered: httpx.AsyncClient) -> None:
    assert (await read(tiered))["attachable"]
    answer = await tiered.post("/v1/tier/attach", json={"url": "memory:", "write": "selective"})
    assert answer.status_code == 200, answer.text
    view = answer.json()
    assert (view["store"], view["url"], view["write"]) == ("memory", "memory:", "selective")
    (item,) = view["items"]
    assert (item["pool"], item["namespace"], item["model"], item["state"]) == ("host", "a1", "org/model", "on")
    again = await tiered.post("/v1/tier/attach", json={"url": "memory:"})
    assert again.status_code == 409
    assert "detach it first" in again.json()["detail"]
    detached = await tiered.post("/v1/tier/detach")
    assert detached.status_code == 200
    assert detached.json() == await read(tiered)
    assert detached.json()["items"] == []
    assert (await tiered.post("/v1/tier/detach")).status_code == 409


async def test_a_bad_url_is_refused_with_its_reason(tiered: httpx.AsyncClient) -> None:
    answer = await tiered.post("/v1/tier/attach", json={"url": "mooncake://m"})
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert (error["field"], error["value"]) == ("url", "mooncake://m")
    assert "mooncake://MASTER:PORT" in error["allowed"]
    for body in ({"url": "memory:", "write": "around"}, {"url": ""}, {}):
        assert (await tiered.post("/v1/tier/attach", json=body)).status_code == 422


async def test_a_password_that_was_given_by_mistake_is_not_in_the_audit_log(
    tiered: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvstow.audit")
    answer = await tiered.post("/v1/tier/attach", json={"url": "redis://me:secret@cache:6379"})
    assert answer.status_code in (409, 422)
    assert "secret" not in answer.text
    assert "/v1/tier/attach" in caplog.text
    assert "secret" not in caplog.text


async def test_the_figures_of_each_pool(tiered: httpx.AsyncClient, tiered_host: TieredHost) -> None:
    tier = tiered_host.begin("mooncake://10.0.0.1:50051")
    tier.break_even.note_fetch(100, 0.5)
    tiered_host.stats = ClientStats(put_bytes=5, get_bytes=7, corrupt_objects=2, timeouts=3, restarts=4)
    tiered_host.health = ClientHealth("failed", "the memory cannot be registered")
    (item,) = (await read(tiered))["items"]
    assert item["fetch_bytes_per_second"] == 100 * 4096 / 0.5
    assert (item["lookup_seconds"], item["breaker"]) == (None, "closed")
    assert item["decision"] == "no request has asked for a fetch yet"
    assert item["counters"]["saved_seconds"] == 0.0
    assert item["clients"] == [
        {
            "purpose": "transfers of rank 0",
            "state": "failed",
            "reason": "the memory cannot be registered",
            "restarts": 4,
            "timeouts": 3,
            "corrupt_objects": 2,
            "put_bytes": 5,
            "get_bytes": 7,
        }
    ]


async def test_a_bypass_has_an_end(tiered: httpx.AsyncClient, tiered_host: TieredHost, clock: FakeClock) -> None:
    tiered_host.begin()
    answer = await tiered.put("/v1/tier/bypass", json={"bypassed": True, "ttl_seconds": 60})
    assert answer.json() == {"bypassed": True, "ttl_seconds_left": 60.0}
    view = await read(tiered)
    assert view["items"][0]["state"] == "bypassed"
    assert view["items"][0]["reason"] == "an operator has switched it off"
    assert view["items"][0]["bypass"] == {"bypassed": True, "ttl_seconds_left": 60.0}
    clock.advance(61.0)
    view = await read(tiered)
    assert (view["bypass"]["bypassed"], view["items"][0]["state"]) == (False, "on")


async def test_one_pool_is_bypassed(tiered: httpx.AsyncClient, tiered_host: TieredHost) -> None:
    tiered_host.begin()
    answer = await tiered.put("/v1/tier/bypass?pool=host", json={"bypassed": True})
    assert answer.json() == {"bypassed": False, "ttl_seconds_left": None}, "that is of the whole host"
    assert (await read(tiered))["items"][0]["bypass"] == {"bypassed": True, "ttl_seconds_left": None}
    await tiered.put("/v1/tier/bypass?pool=host", json={"bypassed": False})
    assert (await read(tiered))["items"][0]["state"] == "on"
    assert (await tiered.put("/v1/tier/bypass?pool=other", json={"bypassed": True})).status_code == 404


async def test_the_objects_of_one_fingerprint_are_purged(tiered: httpx.AsyncClient, tiered_host: TieredHost) -> None:
    tiered_host.begin()
    tiered_host.fill("f", 3)
    tiered_host.fill("g", 2)
    answer = await tiered.post("/v1/tier/purge?wait=30", json={"fingerprint": "f"})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"fingerprint": "f", "objects": 3}
    assert tiered_host.store.num_objects == 2
    (operation,) = (await tiered.get("/v1/operations?kind=tier-purge")).json()["items"]
    assert operation["progress"] == {"done": 3, "total": 0, "unit": "objects"}
    assert (operation["state"], operation["result"], operation["pool"]) == ("succeeded", None, "")
    for fingerprint in ("", ".*", "a:b", "x" * 65):
        refused = await tiered.post("/v1/tier/purge", json={"fingerprint": fingerprint})
        assert refused.status_code == 422, fingerprint


async def test_a_store_that_is_down_fails_the_purge(
    tiered: httpx.AsyncClient, tiered_host: TieredHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: MemoryLookups, fingerprint: str, timeout: float) -> int:
        raise TierUnavailableError(f"no answer in {timeout:g} s")

    tiered_host.begin()
    monkeypatch.setattr(MemoryLookups, "purge", fail)
    answer = await tiered.post("/v1/tier/purge?wait=30", json={"fingerprint": "f"})
    assert answer.status_code == 503
    assert answer.json()["code"] == "tier_unavailable"
    assert answer.json()["detail"] == "no answer in 600 s"


async def test_weights_are_named_after_a_reset(tiered: httpx.AsyncClient, tiered_host: TieredHost) -> None:
    tier = tiered_host.begin()
    early = await tiered.post("/v1/tier/weights", json={"weights_id": "w2"})
    assert early.status_code == 409
    tier.reset()
    answer = await tiered.post("/v1/tier/weights?pool=host", json={"weights_id": "w2"})
    assert answer.status_code == 200
    assert answer.json()["items"][0]["state"] == "off"
    tier.step()
    (item,) = (await read(tiered))["items"]
    assert (item["state"], item["fingerprint"]) == ("on", "print-of-w2")
    assert (await tiered.post("/v1/tier/weights?pool=no", json={"weights_id": "w"})).status_code == 404


async def test_changes_are_in_the_events(tiered: httpx.AsyncClient, tiered_host: TieredHost) -> None:
    tiered_host.begin()
    await tiered.put("/v1/tier/bypass", json={"bypassed": True})
    transport: Any = tiered._transport
    entries, _ = transport.app.state.kvstow.journal.after(0)
    assert [entry.data["path"] for entry in entries if entry.type == "change"] == ["/v1/tier/bypass"]


async def test_changing_the_tier_needs_an_admin(
    launch: Launch, engine: OffloadEngine, tiered_host: TieredHost, tmp_path: Any
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("admin-token-of-some-length\n")
    tokens.chmod(0o600)
    client = await launch(directory=EmbeddedDirectory(engine, 16, tier=tiered_host.control), token_file=tokens)
    assert (await client.get("/v1/tier")).status_code == 200
    for method, path in (
        ("POST", "attach"), ("POST", "detach"), ("PUT", "bypass"), ("POST", "purge"), ("POST", "weights"),
    ):  # fmt: skip
        assert (await client.request(method, f"/v1/tier/{path}")).status_code == 401, path
