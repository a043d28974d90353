"""The pools of a node: each alone, and all at once."""

from __future__ import annotations

import httpx
import pytest
from tests.api.fakenode import RANKS, SLOT_BYTES, SLOTS, FakeNode
from tests.api.node.conftest import KEYS, NAMES, get
from tests.doubles.fakes import FakeClock

pytestmark = pytest.mark.anyio


async def test_each_pool_is_shown_and_changed_alone(client: httpx.AsyncClient, node: FakeNode) -> None:
    for name in NAMES:
        node.attach(name).store(KEYS)
    listed = (await get(client, "/v1/pools"))["items"]
    assert [(one["name"], one["model"], one["sessions"], one["resizable"]) for one in listed] == [
        (name, "org/model", 1, False) for name in NAMES
    ]
    second = f"/v1/pools/{NAMES[1]}"
    removed = await client.post(f"{second}/purge", json={"all": True}, params={"wait": 20})
    assert removed.json()["evicted_slots"] == len(KEYS)
    assert (await client.patch(second, json={"policy": "lru"})).json()["policy"] == "lru"
    assert (await client.patch(second, json={"pinning_paused": True})).status_code == 200
    assert (await client.post(f"{second}/retry")).json() == {"paused": True, "pin_attempt": 1}
    found = {name: await get(client, f"/v1/pools/{name}") for name in NAMES}
    assert [pool["slots"]["cached"] for pool in found.values()] == [4, 0, 4]
    assert [pool["policy"] for pool in found.values()] == ["auto", "lru", "auto"]
    assert [pool["pinning_paused"] for pool in found.values()] == [False, True, False]
    assert len({pool["etag"] for pool in found.values()}) == 3
    assert (await get(client, f"{second}/blocks"))["items"] == []
    assert len((await get(client, f"/v1/pools/{NAMES[2]}/blocks"))["items"]) == 4
    operations = (await get(client, f"/v1/operations?pool={NAMES[1]}"))["items"]
    assert [(one["pool"], one["kind"]) for one in operations] == [(NAMES[1], "purge")]
    assert (await get(client, f"/v1/operations?pool={NAMES[0]}"))["items"] == []


async def test_an_etag_of_one_pool_is_none_of_another(client: httpx.AsyncClient, node: FakeNode) -> None:
    for name in NAMES[:2]:
        node.attach(name)
    etag = (await get(client, f"/v1/pools/{NAMES[0]}"))["etag"]
    answer = await client.patch(f"/v1/pools/{NAMES[1]}", json={"policy": "lru"}, headers={"If-Match": etag})
    assert answer.status_code == 412


async def test_the_node_sets_the_size_of_its_pools(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.attach(NAMES[0])
    for body in ({"capacity_slots": 8}, {"capacity_slots": 8, "dry_run": True}, {"capacity_bytes": 8 * SLOT_BYTES}):
        answer = await client.patch(f"/v1/pools/{NAMES[0]}", json=body)
        assert answer.status_code == 409
        assert "the host sets the size" in answer.json()["detail"]


async def test_a_rank_that_two_engines_have_is_told_apart_by_its_session(
    client: httpx.AsyncClient, node: FakeNode
) -> None:
    node.attach(NAMES[0])
    assert (await get(client, "/v1/ranks/1"))["device"] == "cuda:1"
    assert "allowed: 0 to 1" in (await get(client, "/v1/ranks/2", 404))["detail"]
    node.attach(NAMES[0])
    assert "?session= with one of s1, s2" in (await get(client, "/v1/ranks/1", 409))["detail"]
    assert (await get(client, "/v1/ranks/1?session=s2"))["pid"] == 2002
    assert (await get(client, f"/v1/ranks/1?session=s2&pool={NAMES[0]}"))["session"] == "s2"
    assert "no engine is attached" in (await get(client, "/v1/ranks/1?session=s3", 404))["detail"]


async def test_info_names_what_there_is(client: httpx.AsyncClient, pools: list[str]) -> None:
    info = await get(client, "/v1/info")
    assert (info["node"], info["engine_id"], info["pools"]) == (True, "beef", pools)
    assert info["num_ranks"] == RANKS * len(pools)


async def test_ranks_and_transfers_are_those_of_all_pools(
    client: httpx.AsyncClient, node: FakeNode, clock: FakeClock
) -> None:
    assert (await get(client, "/v1/ranks"))["items"] == (await get(client, "/v1/transfers"))["items"] == []
    for name in (*NAMES, NAMES[0]):
        node.attach(name).begin_store(KEYS[len(node.engines) - 1 : len(node.engines)])
        clock.advance(1.0)
    sessions = {"s1": NAMES[0], "s2": NAMES[1], "s3": NAMES[2], "s4": NAMES[0]}

    ranks = (await get(client, "/v1/ranks"))["items"]
    assert [(one["session"], one["pool"], one["rank"]) for one in ranks] == [
        (session, pool, rank) for session, pool in sessions.items() for rank in range(RANKS)
    ]
    assert {one["session"] for one in (await get(client, f"/v1/ranks?pool={NAMES[0]}"))["items"]} == {"s1", "s4"}
    assert {one["session"] for one in (await get(client, "/v1/ranks?session=s3"))["items"]} == {"s3"}
    assert (await get(client, "/v1/readiness"))["ranks"] == ranks

    transfers = await get(client, "/v1/transfers")
    assert [(one["session"], one["pool"]) for one in transfers["items"]] == list(sessions.items())
    pending = transfers["pending"]
    assert (pending["stores"], pending["store_blocks"], pending["oldest_seconds"]) == (4, 4, 4.0)
    oldest = await get(client, "/v1/transfers?slowest=2")
    assert [one["session"] for one in oldest["items"]] == ["s1", "s2"]
    of_pool = await get(client, f"/v1/transfers?pool={NAMES[0]}")
    assert ([one["session"] for one in of_pool["items"]], of_pool["pending"]["stores"]) == (["s1", "s4"], 2)
    of_session = await get(client, "/v1/transfers?session=s4")
    assert [one["session"] for one in of_session["items"]] == ["s4"]
    for path in ("/v1/ranks", "/v1/transfers"):
        assert (await client.get(f"{path}?pool=unknown")).status_code == 404
        assert (await get(client, f"{path}?session=unknown"))["items"] == []


async def test_ranks_of_lost_sessions_are_not_listed(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.attach(NAMES[0]).control.lose("it ended")
    node.attach(NAMES[0])
    assert {one["session"] for one in (await get(client, "/v1/ranks"))["items"]} == {"s2"}
    assert {one["session"] for one in (await get(client, f"/v1/readiness?pool={NAMES[0]}"))["ranks"]} == {"s2"}


async def test_a_pool_has_its_memory_its_sessions_and_its_switches(
    client: httpx.AsyncClient, node: FakeNode, clock: FakeClock
) -> None:
    node.attach(NAMES[0])
    node.attach(NAMES[0], reports=False)
    node.attach(NAMES[0]).control.lose("it ended")
    node.attach(NAMES[1]).begin_store(KEYS[:1])
    clock.advance(31.0)
    node.shared[NAMES[1]].tick()
    node.granted_bytes = SLOT_BYTES
    await client.put(f"/v1/drain?pool={NAMES[1]}", json={"mode": "stop_stores"})
    await client.put("/v1/bypass", json={"load": True})
    first, second = (await get(client, "/v1/pools"))["items"]
    assert (first["sessions"], first["session_states"]) == (3, {"attaching": 1, "attached": 1, "stuck": 0, "lost": 1})
    assert (second["sessions"], second["session_states"]["stuck"], second["pending"]["stuck"]) == (1, 1, 1)
    assert (first["granted_bytes"], first["due_bytes"]) == (SLOT_BYTES, RANKS * SLOTS * SLOT_BYTES)
    assert [(one["drain_mode"], one["bypassed"]) for one in (first, second)] == [
        (None, ["load"]),
        ("stop_stores", ["load"]),
    ]
    assert second["state"] == "draining"


async def test_what_names_one_pool_says_which(client: httpx.AsyncClient, node: FakeNode) -> None:
    for name in NAMES[:2]:
        node.attach(name).store(KEYS[:1])
    name = NAMES[1]
    stats = await get(client, f"/v1/stats?pool={name}")
    assert stats["pool"]["name"] == name
    (block,) = (await get(client, f"/v1/pools/{name}/blocks"))["items"]
    assert block["namespace"] == f"{name}-keys"


async def test_blocks_of_one_namespace_are_listed(client: httpx.AsyncClient, node: FakeNode) -> None:
    engine = node.attach(NAMES[0])
    engine.store(KEYS[:3])
    fresh = engine.control.reset()
    engine.store(KEYS[2:])
    path, former = f"/v1/pools/{NAMES[0]}/blocks", f"{NAMES[0]}-keys"
    everything = (await get(client, path))["items"]
    assert len(everything) == 5
    for namespace, keys in ((former, KEYS[:3]), (fresh, KEYS[2:]), ("unknown", [])):
        items = (await get(client, f"{path}?namespace={namespace}"))["items"]
        assert [(one["key"], one["namespace"]) for one in items] == [(key.hex(), namespace) for key in keys]
    first = await get(client, f"{path}?namespace={fresh}&page_size=1")
    assert [one["key"] for one in first["items"]] == [KEYS[2].hex()]
    rest = await get(client, f"{path}?namespace={fresh}&page_token={first['next_page_token']}")
    assert [one["key"] for one in rest["items"]] == [KEYS[3].hex()]
