from __future__ import annotations

import time
from typing import Any

import anyio
import httpx
import pytest
from tests.api.conftest import Ranks
from tests.doubles.fakes import FakeClock

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow_api.directory import EmbeddedDirectory

pytestmark = pytest.mark.anyio

REMOVED = {"stored_blocks": 0, "notice": "", "dry_run": False}
HOST = "/v1/pools/host"
SLOT_BYTES = 4096
SELECTORS = [
    {"slots": 1},
    {"bytes": 4096},
    {"idle_seconds": 0},
]


def texts(keys: list[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def states(body: dict[str, Any]) -> dict[str, int]:
    """The slots by state, after checking that they add up."""
    slots: dict[str, int] = body["slots"]
    assert sum(slots.values()) == body["usable_slots"]
    return slots


async def test_the_pool_is_shown_with_states_that_add_up(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys[:6])
    ranks.begin_store(keys[6:8])
    ranks.lease(keys[:2])
    body = (await client.get(HOST)).json()
    assert states(body) == {"free": 8, "filling": 2, "cached": 4, "leased": 2, "quarantined": 0}
    del body["slots"], body["now"]
    assert body.pop("etag")
    pending = body.pop("pending")
    assert (pending["loads"], pending["stores"], pending["store_blocks"], pending["stuck"]) == (0, 1, 2, 0)
    assert body == {
        "name": "host",
        "model": "",
        "state": "ready",
        "reason": "all slots are pinned",
        "sessions": 1,
        "session_states": {"attaching": 0, "attached": 1, "stuck": 0, "lost": 0},
        "resizable": True,
        "slot_bytes": 4096,
        "block_tokens": 16,
        "capacity_slots": 16,
        "capacity_bytes": 16 * 4096,
        "max_capacity_slots": 32,
        "max_capacity_bytes": 32 * 4096,
        "usable_slots": 16,
        "usable_bytes": 16 * 4096,
        "granted_bytes": 2 * 16 * 4096,
        "policy": "auto",
        "pinning_paused": False,
        "leases": 1,
        "num_ranks": 2,
        "due_bytes": 2 * 16 * 4096,
        "drain_mode": None,
        "bypassed": [],
    }


async def test_the_pool_has_its_present_figures(launch: Any, ranks: Any, keys: list[bytes]) -> None:
    client = await launch()
    sampler = launch.state.sampler
    ranks.store(keys[:2])
    sampler.tick()
    ranks.engine.release_lease(ranks.engine.acquire(keys[:4]))
    sampler.tick()
    now = (await client.get(HOST)).json()["now"]
    assert now["hit_ratio"] == 0.5
    (pool,) = (await client.get("/v1/overview")).json()["pools"]
    assert now == pool["now"]


async def test_the_memory_of_a_pool_is_that_of_ranks_of_all_sizes(launch: Any) -> None:
    config = EngineConfig(slot_bytes=4096, capacity_slots=16, num_ranks=2, rank_slot_bytes=(4096, 1024))
    ranks = Ranks(OffloadEngine(config))
    for rank, size in enumerate(config.rank_slot_bytes):
        ranks.engine.report(ranks.make_report(rank, slot_bytes=size))
    client = await launch(directory=EmbeddedDirectory(ranks.engine, 16))
    assert (await client.get(HOST)).json()["granted_bytes"] == 16 * (4096 + 1024)


async def test_quarantined_slots_add_up_too(
    client: httpx.AsyncClient, engine: OffloadEngine, clock: FakeClock, ranks: Any, keys: list[bytes]
) -> None:
    op = ranks.begin_store(keys[:3])
    ranks.finish(op, "source_free")
    clock.advance(31.0)
    engine.tick()
    assert states((await client.get(HOST)).json())["quarantined"] == 3


async def test_all_pools_are_the_host_pool(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/pools")).json() == {"items": [(await client.get(HOST)).json()]}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "", None),
        ("PATCH", "", {"policy": "lru"}),
        ("POST", "/evict", {"slots": 1}),
        ("POST", "/purge", {"all": True}),
        ("POST", "/retry", None),
        ("GET", "/blocks", None),
        ("GET", "/blocks/aa", None),
    ],
)
async def test_another_pool_is_not_found(client: httpx.AsyncClient, method: str, path: str, body: Any) -> None:
    answer = await client.request(method, f"/v1/pools/disk{path}", json=body)
    assert (answer.status_code, answer.json()["detail"]) == (404, "there is no pool 'disk'; there is: host")


# -- evict and purge ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "slots"), [({"slots": 3}, 3), ({"bytes": 2 * SLOT_BYTES + 1}, 3), ({"idle_seconds": 5}, 4)]
)
async def test_evict_removes_what_was_asked_for(
    client: httpx.AsyncClient, clock: FakeClock, ranks: Any, keys: list[bytes], body: dict[str, Any], slots: int
) -> None:
    ranks.store(keys[:4])
    clock.advance(5.0)
    ranks.store(keys[4:8])
    answer = await client.post(f"{HOST}/evict?wait=30", json=body)
    assert answer.status_code == 200
    assert answer.json() == {**REMOVED, "evicted_slots": slots, "evicted_bytes": slots * SLOT_BYTES}
    assert ranks.engine.contains(keys[:8]).count(True) == 8 - slots


@pytest.mark.parametrize("verb", ["evict", "purge"])
@pytest.mark.parametrize("body", SELECTORS)
async def test_a_dry_run_counts_and_changes_nothing(
    client: httpx.AsyncClient, ranks: Any, keys: list[bytes], verb: str, body: dict[str, Any]
) -> None:
    ranks.store(keys[:4])
    planned = (await client.post(f"{HOST}/{verb}?wait=30", json={**body, "dry_run": True})).json()
    assert ranks.engine.lookup(keys[:4]) == 4
    done = (await client.post(f"{HOST}/{verb}?wait=30", json=body)).json()
    assert planned == {**done, "dry_run": True}
    assert done["evicted_slots"] >= 1


async def test_evict_spares_leased_blocks(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys[:4])
    ranks.lease(keys[:1])
    assert (await client.post(f"{HOST}/evict?wait=30", json={"slots": 16})).json()["evicted_slots"] == 3
    assert engine.contains(keys[:4]) == [True, False, False, False]


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ({"all": True}, [False, False, False, False]),
        ({"keys": ["000001010101", "0000aaaa"]}, [True, False, True, True]),
        ({"key_prefixes": ["000001", "000002"]}, [True, False, False, True]),
        ({"slots": 4}, [True, False, False, False]),
        ({"bytes": 1}, [True, True, True, False]),
        ({"idle_seconds": 5}, [True, False, False, True]),
        ({"age_seconds": 5}, [True, False, False, True]),
    ],
)
async def test_purge_takes_its_selector(
    client: httpx.AsyncClient,
    engine: OffloadEngine,
    clock: FakeClock,
    ranks: Any,
    keys: list[bytes],
    body: dict[str, Any],
    left: list[bool],
) -> None:
    ranks.store(keys[:3])
    ranks.lease(keys[:1])
    clock.advance(5.0)
    ranks.report()
    ranks.store(keys[3:4])
    answer = await client.post(f"{HOST}/purge?wait=30", json=body)
    assert answer.status_code == 200
    if "bytes" in body:
        assert answer.json()["evicted_slots"] == engine.contains(keys[:4]).count(False) == 1
    else:
        assert engine.contains(keys[:4]) == left
        assert answer.json()["evicted_slots"] == left.count(False)


# -- pinning ---------------------------------------------------------------------------------------------------------


async def test_retry_asks_the_ranks_to_pin_again(client: httpx.AsyncClient, engine: OffloadEngine) -> None:
    answer = await client.post(f"{HOST}/retry")
    assert (answer.status_code, answer.json()) == (202, {"paused": False, "pin_attempt": 1})
    assert engine.desired().pin_attempt == 1


# -- settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{"capacity_slots": 24}, {"capacity_bytes": 25 * SLOT_BYTES - 1}])
async def test_growing_is_done_at_once(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, body: dict[str, int]
) -> None:
    answer = await client.patch(HOST, json=body)
    assert (answer.status_code, answer.json()["capacity_slots"]) == (200, 24)
    assert answer.json()["usable_slots"] == 16
    assert engine.desired().capacity_slots == 24


async def test_shrinking_removes_what_lies_above(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys)
    planned = (await client.patch(HOST, json={"capacity_slots": 6, "dry_run": True})).json()
    assert planned == {
        "dry_run": True,
        "capacity_slots": 6,
        "policy": "auto",
        "pinning_paused": False,
        "evicted_slots": 10,
        "evicted_bytes": 10 * SLOT_BYTES,
    }
    assert engine.lookup(keys) == 16
    body = (await client.patch(HOST, json={"capacity_slots": 6})).json()
    assert states(body)["cached"] == 6
    (operation,) = (await client.get("/v1/operations")).json()["items"]
    assert operation["result"] == {**REMOVED, "evicted_slots": 10, "evicted_bytes": 10 * SLOT_BYTES}
    engine.check_integrity()


async def test_the_policy_can_be_changed(client: httpx.AsyncClient, ranks: Any) -> None:
    assert (await client.patch(HOST, json={"policy": "lru"})).json()["policy"] == "lru"
    both = (await client.patch(HOST, json={"policy": "auto", "capacity_slots": 8})).json()
    assert (both["policy"], both["capacity_slots"]) == ("auto", 8)


async def test_a_dry_run_of_a_policy_changes_nothing(client: httpx.AsyncClient, ranks: Any) -> None:
    planned = (await client.patch(HOST, json={"policy": "lru", "dry_run": True})).json()
    assert (planned["policy"], planned["capacity_slots"], planned["evicted_slots"]) == ("lru", 16, 0)
    assert (await client.get(HOST)).json()["policy"] == "auto"


async def test_growing_beyond_the_host_names_its_maximum(client: httpx.AsyncClient) -> None:
    slots = (await client.patch(HOST, json={"capacity_slots": 33})).json()
    assert slots["errors"][0]["allowed"] == "1 to 32, the maximum of this host"
    size = (await client.patch(HOST, json={"capacity_bytes": 33 * SLOT_BYTES})).json()
    assert size["errors"][0]["allowed"] == f"4096 (one slot) to {32 * SLOT_BYTES}, the maximum of this host"


async def test_an_etag_guards_against_a_lost_change(client: httpx.AsyncClient, ranks: Any) -> None:
    etag = (await client.get(HOST)).headers["etag"]
    changed = await client.patch(HOST, json={"capacity_slots": 8}, headers={"If-Match": f'"other", {etag}'})
    assert changed.status_code == 200
    assert changed.headers["etag"] == (await client.get(HOST)).headers["etag"] != etag
    late = await client.patch(HOST, json={"capacity_slots": 9}, headers={"If-Match": etag})
    assert (late.status_code, late.json()["code"]) == (412, "precondition_failed")
    assert (await client.patch(HOST, json={"capacity_slots": 9}, headers={"If-Match": "*"})).status_code == 200


async def test_of_two_changes_with_one_etag_at_once_the_second_is_refused(
    client: httpx.AsyncClient, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    etag, administration = (await client.get(HOST)).headers["etag"], type(ranks.engine.admin)
    change = administration.set_policy

    def slow_change(*arguments: Any) -> None:
        time.sleep(0.1)
        change(*arguments)

    monkeypatch.setattr(administration, "set_policy", slow_change)
    statuses = []

    async def patch(policy: str) -> None:
        answer = await client.patch(HOST, json={"policy": policy}, headers={"If-Match": etag})
        statuses.append(answer.status_code)

    async with anyio.create_task_group() as group:
        group.start_soon(patch, "lru")
        group.start_soon(patch, "lru")
    assert sorted(statuses) == [200, 412]


@pytest.mark.parametrize("change", [{"policy": "lru"}, {"pinning_paused": True}, {"capacity_slots": 8}])
async def test_an_etag_does_not_come_back_with_the_settings(
    client: httpx.AsyncClient, ranks: Any, change: dict[str, Any]
) -> None:
    before = (await client.get(HOST)).json()
    etag = before["etag"]
    back = {name: before[name] for name in change}
    for body in (change, back):
        assert (await client.patch(HOST, json=body, params={"wait": 20})).status_code == 200
        ranks.report()
    after = (await client.get(HOST)).json()
    assert {name: after[name] for name in change} == back
    late = await client.patch(HOST, json=change, headers={"If-Match": etag})
    assert late.status_code == 412
    assert (await client.get(HOST)).json()["etag"] == after["etag"] != etag


async def test_what_changes_nothing_leaves_the_etag(client: httpx.AsyncClient, ranks: Any) -> None:
    before = (await client.get(HOST)).json()
    same = {name: before[name] for name in ("policy", "pinning_paused", "capacity_slots")}
    assert (await client.patch(HOST, json=same, params={"wait": 20})).status_code == 200
    assert (await client.patch(HOST, json={"policy": "lru", "dry_run": True})).status_code == 200
    assert (await client.get(HOST)).json()["etag"] == before["etag"]


async def test_a_resize_that_is_taken_back_takes_the_etag_with_it(
    client: httpx.AsyncClient, ranks: Any, keys: list[bytes], eventually: Any
) -> None:
    ranks.store(keys)
    ranks.lease(keys)
    etag = (await client.get(HOST)).json()["etag"]
    answer = await client.patch(HOST, json={"capacity_slots": 4}, params={"wait": 0})
    during = (await client.get(HOST)).json()["etag"]
    await client.post(answer.headers["location"] + "/cancel")

    async def cancelled() -> bool:
        return bool((await client.get(answer.headers["location"])).json()["state"] == "cancelled")

    await eventually(cancelled)
    after = (await client.get(HOST)).json()
    assert after["capacity_slots"] == 16
    assert len({etag, during, after["etag"]}) == 3


# -- operations -----------------------------------------------------------------------------------------------


async def test_a_resize_waits_for_a_lease_as_an_operation(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes], eventually: Any
) -> None:
    ranks.store(keys)
    lease = ranks.lease(keys)
    answer = await client.patch(HOST, json={"capacity_slots": 4}, params={"wait": 0})
    assert answer.status_code == 202
    assert answer.headers["retry-after"] == "1"
    place = answer.headers["location"]
    assert place == f"/v1/operations/{answer.json()['id']}"
    assert (answer.json()["kind"], answer.json()["state"], answer.json()["result"]) == ("resize", "running", None)

    async def is_waiting() -> bool:
        return bool((await client.get(place)).json()["waiting"])

    await eventually(is_waiting)
    assert engine.desired().capacity_slots == 16
    assert (await client.patch(HOST, json={"capacity_slots": 5})).status_code == 409
    states((await client.get(HOST)).json())

    engine.release_lease(lease)

    async def has_ended() -> bool:
        return bool((await client.get(place)).json()["state"] == "succeeded")

    await eventually(has_ended)
    ended = (await client.get(place)).json()
    assert ended["result"]["evicted_slots"] == 12
    assert ended["progress"] == {"done": 12, "total": 12}
    assert ended["ended"] is not None
    assert engine.desired().capacity_slots == 4


async def test_cancelled_while_waited_for_is_a_conflict(
    client: httpx.AsyncClient, ranks: Any, keys: list[bytes], eventually: Any
) -> None:
    ranks.store(keys)
    ranks.lease(keys)

    async def is_running() -> bool:
        items = (await client.get("/v1/operations", params={"state": "running"})).json()["items"]
        for item in items:
            await client.post(f"/v1/operations/{item['id']}/cancel")
        return bool(items)

    async with anyio.create_task_group() as group:
        group.start_soon(eventually, is_running)
        answer = await client.patch(HOST, json={"capacity_slots": 4}, params={"wait": 30})
    assert answer.status_code == 409
    assert "was cancelled" in answer.json()["detail"]


async def test_a_sweep_that_fails_answers_500_and_is_kept(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.store(keys[:1])

    def broken(count: int) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(engine.pool.index, "evict", broken)
    answer = await client.post(f"{HOST}/evict", json={"slots": 1}, params={"wait": 30})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    (operation,) = (await client.get("/v1/operations")).json()["items"]
    assert (operation["state"], operation["error"]) == ("failed", "internal error (RuntimeError)")
