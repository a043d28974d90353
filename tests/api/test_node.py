"""The API of a node with no pool, one, and three."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_untyped
from tests.api.conftest import AGENT
from tests.api.fakenode import RANKS, SLOT_BYTES, SLOTS, FakeNode

from kvstow.status import MemoryStatus
from kvstow.testing.fakes import FakeClock
from kvstow_api.eventstream import EventStreams
from kvstow_api.history import SessionNowView, SessionSample, session_now_of
from kvstow_api.journal import Journal
from kvstow_api.measurements import OrphanedMemory
from kvstow_api.routes import ROUTERS

pytestmark = pytest.mark.anyio

NAMES = ["a-000001", "b-000002", "c-000003"]
KEYS = [b"\x00\x00" + bytes([number]) * 4 for number in range(4)]
ONE_POOL = ["/v1/stats", "/v1/lookup"]
"""Routes about one pool that have nothing to say without one."""
LISTS = ["/v1/history", "/v1/config"]
"""Routes about one pool that answer without one."""

Ask = Callable[..., Awaitable[Any]]
parse: Any = parse_untyped


@pytest.fixture
def node(clock: FakeClock) -> FakeNode:
    return FakeNode(clock)


@pytest.fixture
async def client(launch: Any, node: FakeNode) -> httpx.AsyncClient:
    made: httpx.AsyncClient = await launch(directory=node, agent_token=None)
    return made


@pytest.fixture(params=[0, 1, 3])
def pools(request: pytest.FixtureRequest, node: FakeNode) -> list[str]:
    """The names of 0, 1 and 3 pools, each with one engine and one block."""
    names = NAMES[: request.param]
    for name in names:
        node.attach(name).store(KEYS[:1])
    return names


async def get(client: httpx.AsyncClient, path: str, status: int = 200) -> Any:
    answer = await client.get(path)
    assert answer.status_code == status, answer.text
    return answer.json() if answer.headers["content-type"].endswith("json") else answer.text


async def ask(client: httpx.AsyncClient, path: str) -> httpx.Response:
    if path.startswith("/v1/lookup"):
        return await client.post(path, json={"keys": [KEYS[0].hex()]})
    return await client.get(path)


# -- which pool ------------------------------------------------------------------------------------------------------


async def test_no_reading_route_fails(client: httpx.AsyncClient, pools: list[str]) -> None:
    for router in ROUTERS:
        for route in router.routes:
            path: str = route.path  # type: ignore[attr-defined]
            if "GET" not in route.methods or path in ("/v1/events", "/page/live"):  # type: ignore[attr-defined]
                continue
            answer = await client.get(path.replace("{pool}", "a-000001").replace("{rank}", "0"))
            assert answer.status_code in (200, 404, 409, 422), (path, answer.text)


@pytest.mark.parametrize("path", [*ONE_POOL, *LISTS])
async def test_a_pool_is_named_where_there_are_several(client: httpx.AsyncClient, pools: list[str], path: str) -> None:
    answer = await ask(client, path)
    if len(pools) == 3:
        body = answer.json()
        assert answer.status_code == 422
        assert body["errors"][0]["field"] == "pool"
        assert ", ".join(pools) in body["detail"]
    elif pools or path in LISTS:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 409
        assert answer.json()["detail"] == "no engine has attached yet, so there is no pool"
    for name in pools:
        assert (await ask(client, f"{path}?pool={name}")).status_code == 200
    assert (await ask(client, f"{path}?pool=unknown")).status_code == 404


@pytest.mark.parametrize("path", ["/v1/readiness", "/v1/drain", "/v1/bypass"])
async def test_the_whole_node_answers_without_a_name(client: httpx.AsyncClient, pools: list[str], path: str) -> None:
    assert (await client.get(path)).status_code == 200
    for name in pools:
        assert (await client.get(f"{path}?pool={name}")).status_code == 200
    assert (await client.get(f"{path}?pool=unknown")).status_code == 404


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
    assert (await client.patch(second, json={"policy": "arc"})).json()["policy"] == "arc"
    assert (await client.patch(second, json={"pinning_paused": True})).status_code == 200
    assert (await client.post(f"{second}/retry")).json() == {"paused": True, "pin_attempt": 1}
    found = {name: await get(client, f"/v1/pools/{name}") for name in NAMES}
    assert [pool["slots"]["cached"] for pool in found.values()] == [4, 0, 4]
    assert [pool["policy"] for pool in found.values()] == ["lru", "arc", "lru"]
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
    answer = await client.patch(f"/v1/pools/{NAMES[1]}", json={"policy": "arc"}, headers={"If-Match": etag})
    assert answer.status_code == 412


async def test_the_node_sets_the_size_of_its_pools(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.attach(NAMES[0])
    for body in ({"capacity_slots": 8}, {"capacity_slots": 8, "dry_run": True}, {"capacity_bytes": 8 * SLOT_BYTES}):
        answer = await client.patch(f"/v1/pools/{NAMES[0]}", json=body)
        assert answer.status_code == 409
        assert "the host sets the size" in answer.json()["detail"]


async def test_without_a_pool_the_settings_are_those_of_the_start(launch: Any, node: FakeNode) -> None:
    client = await launch(directory=node, settings={"memory": 1 << 20})
    answer = await client.get("/v1/config")
    assert answer.json() == {"pool": None, "etag": None, "runtime": None, "startup": {"memory": 1 << 20}}
    assert "etag" not in answer.headers


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


# -- all pools at once ---------------------------------------------------------------------------------------------


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


async def test_readiness_has_the_state_of_each_pool(client: httpx.AsyncClient, node: FakeNode) -> None:
    for name in NAMES[:2]:
        node.attach(name)
    node.engines[1].report(state="degraded", error="no memory")
    body = await get(client, "/v1/readiness")
    assert [(one["pool"], one["model"], one["state"]) for one in body["pools"]] == [
        (NAMES[0], "org/model", "ready"),
        (NAMES[1], "org/model", "degraded"),
    ]
    assert body["pools"][1]["reason"] in body["reason"]
    assert body["usable_slots"] == sum(one["usable_slots"] for one in body["pools"])
    (one,) = (await get(client, f"/v1/readiness?pool={NAMES[1]}"))["pools"]
    assert one == body["pools"][1]


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
    assert (stats["pool_name"], stats["model"]) == (name, "org/model")
    for path in ("/v1/history", "/v1/config"):
        assert (await get(client, f"{path}?pool={name}"))["pool"] == name
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


async def test_rejected_engines_are_counted_by_reason(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.rejected["identity"] = 2
    assert (await get(client, "/v1/sessions"))["rejected"] == {"identity": 2, "version": 0}


async def test_the_life_of_a_session_is_told(launch: Any, node: FakeNode, clock: FakeClock) -> None:
    apps: list[Any] = []
    await launch(apps.append, directory=node)
    sampler, journal = apps[0].state.kvstow.sampler, apps[0].state.kvstow.journal

    def told() -> list[Any]:
        last = journal.last
        sampler.tick()
        return [entry.data for entry in journal.after(last)[0] if entry.type == "session"]

    sampler.tick()
    engine = node.attach(NAMES[0], reports=False)
    (data,) = told()
    del data["time"]
    assert data == {
        "pool": NAMES[0],
        "session": "s1",
        "engine": "fake",
        "model": "org/model",
        "state": "attaching",
        "reason": "not all ranks have reported and registered slots",
    }
    engine.report()
    assert [one["state"] for one in told()] == ["attached"]
    assert told() == []
    engine.begin_store(KEYS[:1])
    clock.advance(31.0)
    engine.pool.tick()
    assert [one["state"] for one in told()] == ["stuck"]
    engine.control.lose("it ended")
    assert [one["state"] for one in told()] == ["lost"]
    node.end(engine)
    assert [(one["session"], one["state"]) for one in told()] == [("s1", "over")]
    assert told() == []


async def test_what_a_session_copies_now_is_a_rate() -> None:
    began = datetime(2026, 11, 2, tzinfo=UTC)

    def sample(seconds: float, load_bytes: int, store_bytes: int) -> SessionSample:
        return SessionSample(began + timedelta(seconds=seconds), load_bytes, store_bytes)

    assert session_now_of([]) == SessionNowView()
    assert session_now_of([sample(0, 0, 0)]).load_bytes_per_second is None
    now = session_now_of([sample(0, 0, 0), sample(5, 900, 50), sample(15, 1000, 250)])
    assert now == SessionNowView(seconds=10.0, load_bytes_per_second=10.0, store_bytes_per_second=20.0)
    restarted = session_now_of([sample(0, 1000, 0), sample(5, 0, 100)])
    assert (restarted.load_bytes_per_second, restarted.store_bytes_per_second) == (None, 20.0)


async def test_a_session_has_the_bytes_that_one_rank_copies(launch: Any, node: FakeNode) -> None:
    apps: list[Any] = []
    client = await launch(apps.append, directory=node)
    sampler = apps[0].state.kvstow.sampler
    engine = node.attach(NAMES[0])
    sampler.tick()
    engine.report(load_bytes_total=1 << 20, store_bytes_total=1 << 10)
    sampler.tick()
    (session,) = (await get(client, "/v1/sessions"))["items"]
    now = session["now"]
    assert now["load_bytes_per_second"] == 1024 * now["store_bytes_per_second"] > 0
    node.end(engine)
    sampler.tick()
    assert sampler.now_of_session("s1") == SessionNowView()


# -- readiness and switches ------------------------------------------------------------------------------------------


async def test_readiness_says_what_memory_there_is(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.memory_status = MemoryStatus(4 << 20, 1 << 20)
    body = await get(client, "/v1/readiness")
    assert (body["state"], body["reason"]) == ("pinning", "1 MiB of 4 MiB of memory are populated")
    memory = body["memory"]
    assert (memory["target_bytes"], memory["populated_bytes"], memory["failure"]) == (4 << 20, 1 << 20, None)
    assert (await client.get("/readyz")).status_code == 200
    node.memory_status = MemoryStatus(4 << 20, 4 << 20)
    body = await get(client, "/v1/readiness")
    assert (body["state"], body["reason"]) == ("ready", "no engine has attached yet, so there is no pool")
    node.attach(NAMES[0])
    node.attach(NAMES[1])
    body = await get(client, "/v1/readiness")
    assert (body["state"], body["reason"]) == ("ready", "2 pools, 2 sessions")
    assert (body["usable_slots"], body["capacity_slots"], len(body["ranks"])) == (2 * SLOTS, 2 * SLOTS, 2 * RANKS)
    assert (await get(client, f"/v1/readiness?pool={NAMES[0]}"))["usable_slots"] == SLOTS


async def test_memory_that_cannot_be_had_fails_readyz(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.memory_status = MemoryStatus(4 << 20, 1 << 20, "the cgroup's limit is reached")
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert "[-]memory failed: the cgroup's limit is reached" in answer.text
    body = await get(client, "/v1/readiness")
    assert (body["state"], body["reason"]) == ("degraded", "memory: the cgroup's limit is reached")


async def test_what_one_engine_does_fails_no_probe(client: httpx.AsyncClient, node: FakeNode, clock: FakeClock) -> None:
    stuck, fine = node.attach(NAMES[0]), node.attach(NAMES[1])
    stuck.begin_store(KEYS)
    clock.advance(1000.0)
    fine.report()
    for pool in node.shared.values():
        pool.tick()
    answer = await client.get("/readyz?verbose")
    assert answer.status_code == 200
    assert "[-]transfers failed: session s1 (fake) is stuck, its oldest transfer for 1000.0 s" in answer.text
    assert "[-]ranks failed: session s1 (fake): rank 0 last reported 1000.0 s ago" in answer.text
    assert "session s2" not in answer.text
    body = await get(client, "/v1/readiness")
    assert body["state"] == "degraded"
    assert body["reason"].startswith(f"pool {NAMES[0]}: session 1 (fake): 1 transfers are stuck")
    (first, second) = (await get(client, "/v1/sessions"))["items"]
    assert (first["state"], first["oldest_seconds"], second["state"]) == ("stuck", 1000.0, "attached")


async def test_a_lost_session_counts_in_no_check(client: httpx.AsyncClient, node: FakeNode, clock: FakeClock) -> None:
    node.attach(NAMES[0]).control.lose("it is gone")
    clock.advance(1000.0)
    lines = (await client.get("/readyz?verbose")).text.splitlines()
    assert not [line for line in lines if line.startswith("[-]")]
    assert (await get(client, "/v1/readiness"))["ranks"] == []
    (session,) = (await get(client, "/v1/sessions"))["items"]
    assert (session["state"], session["processes"]) == ("lost", 1)


async def test_engines_have_time_to_report(launch: Any, node: FakeNode, clock: FakeClock) -> None:
    client = await launch(directory=node, startup_grace=10.0)
    clock.advance(1000.0)
    node.attach(NAMES[0], reports=False)
    assert "[+]ranks ok" in (await client.get("/readyz?verbose")).text
    clock.advance(10.0)
    assert "rank 0 has never reported" in (await client.get("/readyz?verbose")).text


async def test_required_checks_fail_readyz(launch: Any, node: FakeNode) -> None:
    client = await launch(directory=node, readiness_require=("pool", "pinned"))
    assert (await client.get("/readyz")).status_code == 200
    node.attach(NAMES[0], reports=False).control.pool.admin.start_resize(0).run()
    node.memory_status = MemoryStatus(2, 1)
    text = (await client.get("/readyz")).text
    assert f"[-]pool failed: no slot is usable yet in pool {NAMES[0]}" in text
    assert "[-]pinned failed: 1 B of 2 B of memory are populated" in text


async def test_records_that_are_wrong_fail_readyz(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.attach(NAMES[0]).pool.integrity_error = "a slot is in two states"
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert f"the records of pool {NAMES[0]} are inconsistent" in answer.text


async def test_a_drain_is_of_the_node_or_of_one_pool(client: httpx.AsyncClient, node: FakeNode) -> None:
    for name in NAMES[:2]:
        node.attach(name)
    assert (await client.put(f"/v1/drain?pool={NAMES[0]}", json={})).json()["active"] is True
    assert (await get(client, "/v1/drain"))["active"] is False
    assert (await get(client, f"/v1/drain?pool={NAMES[1]}"))["active"] is False
    assert (await client.get("/readyz")).status_code == 200
    await client.put("/v1/drain", json={"mode": "stop_stores"})
    node.attach(NAMES[2])
    assert {(await get(client, f"/v1/drain?pool={name}"))["mode"] for name in NAMES} == {"stop_stores"}
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert "an operator drains the node (mode stop_stores)" in answer.text
    await client.delete("/v1/drain")
    assert not any([(await get(client, f"/v1/drain?pool={name}"))["active"] for name in NAMES])


async def test_a_bypass_is_of_the_node_or_of_one_pool(client: httpx.AsyncClient, node: FakeNode) -> None:
    for name in NAMES[:2]:
        node.attach(name)
    await client.put(f"/v1/bypass?pool={NAMES[0]}", json={"load": True})
    assert [(await get(client, f"/v1/bypass?pool={name}"))["load"] for name in NAMES[:2]] == [True, False]
    assert (await get(client, "/v1/bypass"))["load"] is False
    await client.put("/v1/bypass", json={"store": True})
    node.attach(NAMES[2])
    assert all([(await get(client, f"/v1/bypass?pool={name}"))["store"] for name in NAMES])


# -- sessions and namespaces -----------------------------------------------------------------------------------------


async def test_sessions_have_these_fields(client: httpx.AsyncClient, node: FakeNode, clock: FakeClock) -> None:
    engine = node.attach(NAMES[0])
    engine.begin_store(KEYS)
    clock.advance(2.0)
    (session,) = (await get(client, "/v1/sessions"))["items"]
    assert session == {
        "id": "s1",
        "engine": "fake",
        "model": "org/model",
        "pool": NAMES[0],
        "namespace": f"{NAMES[0]}-keys",
        "host": "node",
        "pid": 1000,
        "state": "attached",
        "age_seconds": 2.0,
        "in_flight": 1,
        "oldest_seconds": 2.0,
        "leases": 0,
        "leased_slots": 0,
        "registered_slots": SLOTS,
        "quarantined_slots": 0,
        "processes": 1,
        "ranks": [
            {"rank": rank, "pid": 1001 + rank, "device": f"cuda:{rank}", "registered_slots": SLOTS}
            for rank in range(RANKS)
        ],
        "now": {"seconds": 0.0, "load_bytes_per_second": None, "store_bytes_per_second": None},
    }


@pytest.mark.parametrize(("query", "killed"), [("", False), ("?kill=false", False), ("?kill=true", True)])
async def test_a_session_is_gone_when_its_processes_are(
    client: httpx.AsyncClient, node: FakeNode, query: str, killed: bool
) -> None:
    engine = node.attach(NAMES[0])
    engine.begin_store(KEYS)
    answer = await client.delete(f"/v1/sessions/s1{query}")
    assert (answer.status_code, answer.json()) == (202, {"id": "s1", "killed": killed})
    assert node.detached == [("s1", killed)]
    (session,) = (await get(client, "/v1/sessions"))["items"]
    assert (session["state"], session["quarantined_slots"]) == ("lost", len(KEYS))
    node.end(engine)
    assert (await get(client, "/v1/sessions"))["items"] == []
    assert (await client.delete("/v1/sessions/s1")).status_code == 404


async def test_a_bad_word_detaches_nobody(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.attach(NAMES[0])
    for query in ("?kill=perhaps", "?killed=true", "?kill"):
        assert (await client.delete(f"/v1/sessions/s1{query}")).status_code == 422
    assert node.detached == []


async def test_a_pool_is_deleted_when_no_session_uses_it(client: httpx.AsyncClient, node: FakeNode) -> None:
    engine = node.attach(NAMES[0])
    path = f"/v1/pools/{NAMES[0]}"
    assert (await client.delete(path)).status_code == 409
    node.end(engine)
    answer = await client.delete(path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert (await client.delete(path)).status_code == 404
    assert (await get(client, "/v1/pools"))["items"] == []


async def test_namespaces_say_why_nothing_is_shared(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.sharing_off = ("its keys are not reproducible",)
    node.attach(NAMES[0]).store(KEYS)
    node.attach(NAMES[0])
    (namespace,) = (await get(client, "/v1/namespaces"))["items"]
    assert namespace == {
        "name": f"{NAMES[0]}-keys",
        "pool": NAMES[0],
        "model": "org/model",
        "weights_id": "w",
        "weights_source": "snapshot",
        "sessions": 2,
        "blocks": len(KEYS),
        "dropped": False,
        "sharing_off": ["its keys are not reproducible"],
    }


async def test_an_embedded_engine_is_one_pool_session_and_namespace(launch: Any, engine: Any, ranks: Any) -> None:
    client = await launch()
    ranks.store(KEYS)
    ranks.begin_store([b"more"])
    (session,) = (await get(client, "/v1/sessions"))["items"]
    assert (session["id"], session["pool"], session["namespace"]) == (engine.engine_id, "host", "host")
    assert (session["state"], session["in_flight"], session["processes"]) == ("attached", 1, 2)
    assert session["ranks"] == [
        {"rank": rank, "pid": 1000 + rank, "device": f"cuda:{rank}", "registered_slots": 16} for rank in range(2)
    ]
    (namespace,) = (await get(client, "/v1/namespaces"))["items"]
    assert (namespace["pool"], namespace["sessions"], namespace["blocks"]) == ("host", 1, 4)
    assert len(namespace["sharing_off"]) == 1
    memory = (await get(client, "/v1/readiness"))["memory"]
    pool_bytes = 2 * 16 * 4096
    assert memory == {
        "target_bytes": pool_bytes,
        "populated_bytes": pool_bytes,
        "failure": None,
        "granted_bytes": pool_bytes,
        "used_bytes": 2 * 5 * 4096,
        "recalled_bytes": 0,
        "orphaned_bytes": None,
        "notices": [],
        "keeper": None,
        "keeper_restarts": 0,
        "extents_kept": 0,
        "extents_given_up": 0,
    }
    for path in ("/v1/ranks", "/v1/ranks?pool=host", f"/v1/ranks?session={engine.engine_id}"):
        items = (await get(client, path))["items"]
        assert [(one["rank"], one["pool"], one["session"]) for one in items] == [
            (rank, "host", engine.engine_id) for rank in range(2)
        ]
    assert (await client.delete(f"/v1/sessions/{engine.engine_id}")).status_code == 409
    assert (await client.delete("/v1/sessions/another")).status_code == 404
    assert (await client.delete("/v1/pools/host")).status_code == 409


async def test_nobody_reports_over_http(launch: Any, node: FakeNode, tmp_path: Any) -> None:
    token = tmp_path / "token"
    token.write_text("admin")
    client = await launch(directory=node, agent_token=None, token_file=token)
    for headers in ({}, AGENT, {"Authorization": "Bearer admin"}):
        answer = await client.post("/v1/ranks/0/report", json={}, headers=headers)
        assert answer.status_code == 401, headers
        assert answer.headers["www-authenticate"].startswith("Bearer")


# -- metrics, history, events ----------------------------------------------------------------------------------------


Families = dict[str, Any]


async def scrape(client: httpx.AsyncClient) -> Families:
    return {family.name: family for family in parse(await get(client, "/metrics"))}


def values(families: Families, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """By the values of these labels."""
    return {tuple(one.labels[label] for label in labels): one.value for one in families[name].samples}


async def test_metrics_of_pools_have_their_names(client: httpx.AsyncClient, node: FakeNode, pools: list[str]) -> None:
    node.memory_status = MemoryStatus(4 << 20, 1 << 20)
    node.count_error("log_line_dropped")
    if pools:
        node.attach(pools[0])  # a rank 0 more
    families = await scrape(client)
    samples = [(s.name, frozenset(s.labels.items())) for family in families.values() for s in family.samples]
    assert len(set(samples)) == len(samples), "no series is there twice"
    assert not [labels for _, labels in samples if "session" in dict(labels)], "sessions come and go"
    for name in ("kvstow_pool_usable_blocks", "kvstow_leases", "kvstow_transfers_stuck", "kvstow_config_info"):
        assert list(values(families, name, "pool", "model")) == [(pool, "org/model") for pool in pools], name
    for name in ("kvstow_rank_ready", "kvstow_pool_pinned_bytes", "kvstow_rank_pending_ops"):
        ranks = [(pool, "org/model", str(rank)) for pool in pools for rank in range(RANKS)]
        assert list(values(families, name, "pool", "model", "rank")) == ranks, name
    errors = [s for s in families["kvstow_errors"].samples if s.labels["code"] == "log_line_dropped"]
    assert [(s.labels["pool"], s.value) for s in errors] == [*((name, 0.0) for name in pools), ("", 1.0)]
    sessions = values(families, "kvstow_sessions", "pool", "state")
    assert {key: value for key, value in sessions.items() if value} == {
        (pool, "attached"): 2.0 if pool == pools[0] else 1.0 for pool in pools
    }
    assert len(sessions) == 4 * len(pools), "also states that no session is in"
    (state,) = [s.labels["state"] for s in families["kvstow_state"].samples if s.value]
    assert state == "pinning"


async def test_figures_of_ranks_are_one_of_all_engines(client: httpx.AsyncClient, node: FakeNode) -> None:
    first, second = node.attach(NAMES[0]), node.attach(NAMES[0])
    first.report(queued_loads=3, pending_ops=4, pin_rate_bytes_per_second=None, chunks_total=2, numa_bytes={"0": 5})
    second.report(
        queued_loads=1,
        pending_ops=1,
        pin_rate_bytes_per_second=9.0,
        chunks_total=1,
        chunks_done=1,
        pinned_slots=4,
        pinned_bytes=4 * SLOT_BYTES,
        numa_bytes={"0": 7, "1": 1},
    )
    families = await scrape(client)
    rank = (NAMES[0], "0")

    def figure(name: str, **labels: str) -> float:
        return values(families, name, "pool", "rank", *labels)[(*rank, *labels.values())]

    assert figure("kvstow_pool_pinned_bytes") == 4 * SLOT_BYTES
    assert figure("kvstow_pin_progress_ratio") == 4 / SLOTS
    assert figure("kvstow_pin_rate_bytes_per_second") == 9.0
    assert figure("kvstow_rank_pending_ops") == 5
    assert figure("kvstow_transfer_queue_depth", direction="load") == 4
    assert figure("kvstow_pin_chunks", state="done") == 1
    assert figure("kvstow_pin_chunks", state="pending") == 2
    assert figure("kvstow_pool_numa_bytes", numa_node="0") == 7
    assert figure("kvstow_rank_ready") == 1
    second.report(state="degraded", error="no memory")
    families = await scrape(client)
    assert figure("kvstow_rank_ready") == 0
    second.control.lose("it ended")
    families = await scrape(client)
    assert figure("kvstow_rank_ready") == 1
    assert figure("kvstow_pool_pinned_bytes") == SLOTS * SLOT_BYTES


async def test_counters_of_ranks_never_shrink_while_the_pool_lives(client: httpx.AsyncClient, node: FakeNode) -> None:
    def busy(families: Families) -> float:
        return values(families, "kvstow_transfer_busy_seconds", "pool", "rank", "direction")[NAMES[0], "1", "load"]

    def failed(families: Families) -> float:
        return values(families, "kvstow_pin_failures", "pool", "rank", "reason")[NAMES[0], "1", "driver"]

    first, second = node.attach(NAMES[0]), node.attach(NAMES[0])
    assert busy(await scrape(client)) == 0.0
    first.report(load_busy_seconds=3.0, pin_failures={"driver": 2})
    second.report(load_busy_seconds=1.0)
    assert (busy(await scrape(client)), failed(await scrape(client))) == (4.0, 2.0)
    node.end(first)
    assert (busy(await scrape(client)), failed(await scrape(client))) == (4.0, 2.0)
    second.report(load_busy_seconds=1.5)
    assert busy(await scrape(client)) == 4.5
    again = node.attach(NAMES[0], reports=False)  # the engine of `first`, with the boots and counters that it had
    again.control.name = first.session_id
    for rank in range(RANKS):
        again.report_rank(rank, boot_id=f"{first.session_id}-{rank}", load_busy_seconds=3.25)
    assert busy(await scrape(client)) == 4.75
    for engine in list(node.engines):
        node.end(engine)
    families = await scrape(client)
    assert busy(families) == 4.75
    assert families["kvstow_rank_ready"].samples == []


async def test_the_series_of_a_pool_end_with_it(client: httpx.AsyncClient, node: FakeNode) -> None:
    for name in NAMES[:2]:
        node.attach(name).store(KEYS)
        node.engines[-1].report(load_busy_seconds=2.0)
    stored, busy = ("kvstow_store_blocks", "pool", "outcome"), ("kvstow_transfer_busy_seconds", "pool", "direction")
    before = await scrape(client)
    node.end(node.engines[0])
    assert values(await scrape(client), *stored) == values(before, *stored), "a pool outlives its engines"
    await client.delete(f"/v1/pools/{NAMES[0]}")
    after = await scrape(client)
    left = {sample.labels["pool"] for family in after.values() for sample in family.samples if "pool" in sample.labels}
    assert left - {""} == {NAMES[1]}
    assert values(after, *stored)[NAMES[1], "stored"] == len(KEYS)
    node.attach(NAMES[0])
    again = await scrape(client)
    assert values(again, *stored)[NAMES[0], "stored"] == 0
    assert values(again, *busy)[NAMES[0], "load"] == 0


async def test_metrics_of_a_node_s_memory(launch: Any, node: FakeNode, eventually: Any) -> None:
    apps: list[Any] = []
    client = await launch(
        apps.append, directory=node, orphaned_memory=lambda: [OrphanedMemory("a", 5), OrphanedMemory("b", 6)]
    )
    node.memory_status = MemoryStatus(
        target_bytes=40,
        populated_bytes=39,
        granted_bytes=38,
        used_bytes=37,
        recalled_bytes=36,
        notices=("pool a waits",),
        keeper="connected",
        keeper_restarts=2,
        extents_kept=3,
        extents_given_up=4,
    )
    node.rejected["identity"] = 2
    await apps[0].state.kvstow.orphans.look()
    families = await scrape(client)
    found = {
        name.removeprefix("kvstow_node_"): sample.value
        for name, family in families.items()
        if name.startswith("kvstow_node_")
        for sample in family.samples
        if not sample.labels
    }
    assert found == {
        "target_bytes": 40,
        "populated_bytes": 39,
        "granted_bytes": 38,
        "used_bytes": 37,
        "recalled_bytes": 36,
        "orphaned_bytes": 11,
        "memory_notices": 1,
        "keeper_up": 1,
        "keeper_restarts": 2,
    }
    handed_back = values(families, "kvstow_node_handed_back_extents", "outcome")
    assert handed_back == {("kept",): 3, ("given_up",): 4}
    assert values(families, "kvstow_rejected_connections", "reason") == {("identity",): 2, ("version",): 0}
    assert (await get(client, "/v1/readiness"))["memory"]["orphaned_bytes"] == 11
    node.memory_status = replace(node.memory_status, keeper="gone")
    assert values(await scrape(client), "kvstow_node_keeper_up") == {(): 0}


async def test_memory_that_cannot_be_measured_has_no_series(launch: Any, node: FakeNode, caplog: Any) -> None:
    def refuse() -> list[OrphanedMemory]:
        raise PermissionError("/proc cannot be read")

    apps: list[Any] = []
    client = await launch(apps.append, directory=node, orphaned_memory=refuse)
    for _ in range(2):
        await apps[0].state.kvstow.orphans.look()
    assert (await scrape(client))["kvstow_node_orphaned_bytes"].samples == []
    assert (await get(client, "/v1/readiness"))["memory"]["orphaned_bytes"] is None
    assert caplog.text.count("looking for orphaned memory failed") == 1


async def test_histories_are_of_pools_and_end_with_them(launch: Any, node: FakeNode) -> None:
    apps: list[Any] = []
    client = await launch(apps.append, directory=node)
    sampler = apps[0].state.kvstow.sampler
    node.attach(NAMES[0]).store(KEYS)
    node.attach(NAMES[1])
    sampler.tick()
    histories = {name: await get(client, f"/v1/history?pool={name}") for name in NAMES[:2]}
    assert [[one["stored_blocks"] for one in each["items"]] for each in histories.values()] == [[4], [0]]
    node.end(node.engines[0])
    node.delete_pool(NAMES[0])
    node.attach(NAMES[0])  # another life of it
    sampler.tick()
    (sample,) = (await get(client, f"/v1/history?pool={NAMES[0]}"))["items"]
    assert sample["stored_blocks"] == 0


async def test_the_journal_names_pools_and_sessions(launch: Any, node: FakeNode) -> None:
    apps: list[Any] = []
    await launch(apps.append, directory=node)
    state = apps[0].state.kvstow
    node.attach(NAMES[0])
    state.sampler.tick()
    node.attach(NAMES[1]).report(state="degraded", error="no memory")
    state.sampler.tick()
    told = [
        (entry.type, entry.data["pool"], entry.data.get("session"), entry.data["state"])
        for entry in state.journal.after(0)[0]
        if entry.type in ("state", "rank")
    ]
    assert told == [
        ("state", None, None, "ready"),
        ("state", NAMES[0], None, "ready"),
        *[("rank", NAMES[0], "s1", "ready")] * RANKS,
        ("state", None, None, "degraded"),
        ("state", NAMES[1], None, "degraded"),
        *[("rank", NAMES[1], "s2", "degraded")] * RANKS,
    ]


async def test_memory_that_a_pool_gets_after_the_first_is_no_event(launch: Any, node: FakeNode) -> None:
    apps: list[Any] = []
    await launch(apps.append, directory=node)
    state = apps[0].state.kvstow
    engine = node.attach(NAMES[0], reports=False)

    def tick(rank_state: str, **changes: Any) -> list[tuple[str, str]]:
        last = state.journal.last
        engine.report(state=rank_state, **changes)
        state.sampler.tick()
        return [(entry.type, entry.data["state"]) for entry in state.journal.after(last)[0]]

    assert tick("pinning") == [
        ("state", "ready"),
        ("state", "ready"),
        ("session", "attached"),
        *[("rank", "pinning")] * RANKS,
    ]
    assert tick("ready") == [("rank", "ready")] * RANKS
    for _ in range(3):
        engine.pool.add_extent(SLOTS)
        assert node.pools()[0].facade.readiness().state == "pinning"
        assert tick("pinning") == []
        engine.pool.set_populated(engine.pool.capacity)
        assert tick("ready") == []
    assert tick("degraded", error="no memory") == [
        ("state", "degraded"),
        ("state", "degraded"),
        *[("rank", "degraded")] * RANKS,
    ]
    assert tick("pinning") == [("state", "ready"), ("state", "ready"), *[("rank", "pinning")] * RANKS]


async def test_block_events_are_of_one_pool(client: httpx.AsyncClient, pools: list[str]) -> None:
    if len(pools) != 1:  # else the stream does not end
        answer = await client.get("/v1/events?types=stored")
        assert answer.status_code == (422 if pools else 409)
    assert (await client.get("/v1/events?pool=unknown")).status_code == 404


async def test_a_stream_of_a_pool_leaves_out_what_is_said_of_others(node: FakeNode) -> None:
    engine, other = node.attach(NAMES[0]), node.attach(NAMES[1])
    journal = Journal()
    stream = EventStreams(node, journal).open(("state", "change", "stored"), node.find_pool(NAMES[0]), poll=0.0)
    await anext(stream)  # how soon to reconnect
    journal.add("state", pool=NAMES[1], state="ready")
    journal.add("state", pool=NAMES[0], state="degraded")
    journal.add("change", actor="admin")
    other.store([b"other"])
    engine.store([b"mine"])
    text = (await anext(stream)).decode()
    await stream.aclose()  # type: ignore[attr-defined]
    assert [line for line in text.splitlines() if line.startswith("event:")] == [
        "event: state",
        "event: change",
        "event: stored",
    ]
    assert "degraded" in text
    assert b"mine".hex() in text


async def test_a_stream_of_the_node_goes_on_when_its_pools_change(node: FakeNode) -> None:
    journal = Journal()
    streams = EventStreams(node, journal)
    journal.add("state", pool=None, state="ready")
    first = streams.open(("state",), recent=1, poll=0.0)
    text = [await anext(first) for _ in range(2)][1].decode()
    seen = text.partition("id: ")[2].partition("\n")[0]
    await first.aclose()  # type: ignore[attr-defined]
    node.attach(NAMES[0])
    journal.add("state", pool=NAMES[0], state="degraded")
    again = streams.open(("state",), after=seen, poll=0.0)
    text = [await anext(again) for _ in range(2)][1].decode()
    await again.aclose()  # type: ignore[attr-defined]
    assert "degraded" in text
    assert "lost" not in text


# -- the doctor and the page -----------------------------------------------------------------------------------------


async def test_the_doctor_of_a_node(client: httpx.AsyncClient, pools: list[str]) -> None:
    told = await get(client, "/v1/doctor")
    assert told["findings"] == []
    assert told["healthy"]
    assert {"node_memory", "orphaned_memory", "trust_eof"} <= set(told["checks"])
    if not pools:
        assert told["skipped"]["thrashing"] == "no engine has attached yet, so there is no pool"
        assert told["skipped"]["sessions"] == "no engine is attached"


async def test_the_doctor_names_what_is_wrong(launch: Any, node: FakeNode, clock: FakeClock) -> None:
    orphan = OrphanedMemory("the keeper with pid 7 holds 2 extents", 2 << 20)
    client = await launch(directory=node, orphaned_memory=lambda: [orphan])
    node.trust_eof = 30.0
    node.sharing_off = ("its keys are not reproducible",)
    node.memory_status = MemoryStatus(4 << 20, 1 << 20, "the cgroup's limit is reached")
    node.attach(NAMES[0]).begin_store(KEYS)
    clock.advance(1000.0)
    node.shared[NAMES[0]].tick()
    lost = node.attach(NAMES[1])
    lost.begin_store(KEYS)
    lost.control.lose("it is gone")
    node.shared[NAMES[1]].admin.drain("all", None)
    findings = {(one["check"], one["severity"]): one for one in (await get(client, "/v1/doctor"))["findings"]}
    assert set(findings) == {
        ("readiness", "error"),
        ("node_memory", "error"),
        ("orphaned_memory", "warning"),
        ("sessions", "error"),
        ("sessions", "warning"),
        ("sharing", "info"),
        ("trust_eof", "warning"),
        ("switches", "warning"),
    }
    assert findings["sessions", "error"]["what"].startswith(f"session s1 (fake, pool {NAMES[0]}) is stuck")
    assert "`kvstow detach s1 --kill`" in findings["sessions", "error"]["fix"]
    assert findings["sessions", "warning"]["evidence"] == {"processes": 1, "held_slots": len(KEYS)}
    assert findings["orphaned_memory", "warning"]["what"] == orphan.words
    assert "its keys are not reproducible" in findings["sharing", "info"]["what"]
    assert "--trust-eof" in findings["trust_eof", "warning"]["what"]
    assert findings["switches", "warning"]["what"] == f"pool {NAMES[1]}: the pool is draining (mode all)"
    assert findings["switches", "warning"]["pool"] == NAMES[1]
    assert findings["sessions", "error"]["session"] == "s1"
    assert findings["trust_eof", "warning"]["pool"] is None


async def test_the_doctor_tells_the_ranks_of_several_engines_apart(client: httpx.AsyncClient, node: FakeNode) -> None:
    moved = {"load_bytes_total": 4 << 30}
    for name, busy, notice in ((NAMES[0], 1.0, None), (NAMES[0], 9.0, None), (NAMES[1], 9.0, "bound to no NUMA node")):
        node.attach(name).report(**moved, load_busy_seconds=busy, notice=notice)
    found = (await get(client, "/v1/doctor"))["findings"]
    links = [one for one in found if one["check"] == "links"]
    assert [(one["pool"], one["session"], one["evidence"]["rank"]) for one in links] == [
        (NAMES[0], "s2", rank) for rank in range(RANKS)
    ]
    assert links[0]["what"].startswith(f"pool {NAMES[0]}: rank 0 of session s2 loads at")
    numa = [one for one in found if one["check"] == "numa"]
    assert {(one["pool"], one["session"]) for one in numa} == {(NAMES[1], "s3")}
    assert len(found) == 2 * RANKS


async def test_the_doctor_knows_memory_the_keeper_and_who_was_rejected(
    client: httpx.AsyncClient, node: FakeNode
) -> None:
    node.attach(NAMES[0])
    node.memory_status = MemoryStatus(4, 4, keeper="connected", notices=("pool b gets no memory yet: ...",))
    node.rejected["version"] = 3
    node.granted_bytes = SLOT_BYTES

    async def findings() -> dict[str, Any]:
        return {one["check"]: one for one in (await get(client, "/v1/doctor"))["findings"]}

    found = await findings()
    assert {check: one["severity"] for check, one in found.items()} == {
        "share": "warning",
        "node_memory": "info",
        "rejected": "info",
    }
    assert (found["share"]["pool"], found["share"]["evidence"]["granted_bytes"]) == (NAMES[0], SLOT_BYTES)
    assert found["node_memory"]["what"] == "pool b gets no memory yet: ..."
    assert found["rejected"]["evidence"] == {"rejected_version": 3}
    node.memory_status = MemoryStatus(4, 4, keeper="gone")
    node.granted_bytes = RANKS * SLOTS * SLOT_BYTES
    assert {check: one["severity"] for check, one in (await findings()).items()} == {
        "keeper": "warning",
        "rejected": "info",
    }


async def test_a_switch_of_the_node_is_found_once(client: httpx.AsyncClient, node: FakeNode) -> None:
    for name in NAMES:
        node.attach(name)
    node.switches.drain("all", None)
    node.switches.set_bypass(load=True, store=False, ttl_seconds=None)
    found = [one["what"] for one in (await get(client, "/v1/doctor"))["findings"] if one["check"] == "switches"]
    assert found == ["loads are bypassed", "the node is draining (mode all)"]


async def test_the_page_shows_pools_and_engines(client: httpx.AsyncClient, node: FakeNode, pools: list[str]) -> None:
    text = await get(client, "/")
    for name in pools:
        assert name in text
    for engine in node.engines:
        assert engine.session_id in text
    section = text.partition('<section id="pools">')[2].partition("</section>")[0]
    assert ("no engine has attached yet" in section) == (not pools)
    assert ("Hit ratio" in text) == (len(pools) == 1), "figures are of one pool"
