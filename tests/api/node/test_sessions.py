"""The sessions and namespaces of a node."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from tests.api.conftest import AGENT, send_report
from tests.api.fakenode import RANKS, SLOTS, FakeNode
from tests.api.node.conftest import KEYS, NAMES, get
from tests.doubles.fakes import FakeClock

from kvstow.status import MemoryStatus, SessionStatus
from kvstow.tier.blockstore import Purged
from kvstow_api.figures import SessionSample, session_now

pytestmark = pytest.mark.anyio
SESSION = SessionStatus(
    id="s1",
    engine="",
    pool="a",
    namespace="a",
    state="attached",
    in_flight=0,
    oldest_seconds=0.0,
    leases=0,
    leased_slots=0,
    registered_slots=0,
    quarantined_slots=0,
    processes=0,
    ranks=(),
)


async def test_rejected_engines_are_counted_by_reason(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.rejected["identity"] = 2
    assert (await get(client, "/v1/sessions"))["rejected"] == {"identity": 2, "version": 0}


async def test_the_life_of_a_session_is_told(launch: Any, node: FakeNode, clock: FakeClock) -> None:
    await launch(directory=node)
    sampler, journal = launch.state.sampler, launch.state.journal

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
    def rates(*samples: tuple[float, int, int]) -> tuple[float | None, float | None]:
        session = session_now(SESSION, [SessionSample(*one) for one in samples])
        return session.load_bytes_per_second, session.store_bytes_per_second

    assert rates() == rates((0, 0, 0)) == (None, None)
    assert rates((0, 0, 0), (5, 900, 50), (15, 1000, 250)) == (10.0, 20.0)
    assert rates((0, 1000, 0), (5, 0, 100)) == (None, 20.0)


async def test_a_session_has_the_bytes_that_one_rank_copies(launch: Any, node: FakeNode) -> None:
    client = await launch(directory=node)
    sampler = launch.state.sampler
    engine = node.attach(NAMES[0])
    sampler.tick()
    engine.report(load_bytes_total=1 << 20, store_bytes_total=1 << 10)
    sampler.tick()
    (session,) = (await get(client, "/v1/sessions"))["items"]
    assert session["load_bytes_per_second"] == 1024 * session["store_bytes_per_second"] > 0
    (last,) = node.sessions()
    node.end(engine)
    sampler.tick()
    assert sampler.now_of_session(last) is last


async def test_what_was_copied_before_the_server_started_is_no_rate(launch: Any, node: FakeNode) -> None:
    """A service that was started again meets ranks that have copied for days."""
    client = await launch(directory=node)
    sampler = launch.state.sampler
    engine = node.attach(NAMES[0], reports=False)
    sampler.tick()
    ever = {"load_bytes_total": 12 << 30, "load_busy_seconds": 500.0}
    engine.report_rank(0, **ever)
    sampler.tick()
    engine.report(**ever)
    sampler.tick()
    sampler.tick()
    (session,) = (await get(client, "/v1/sessions"))["items"]
    assert session["load_bytes_per_second"] == 0
    busy = [rank["load"] for rank in sampler.rank_counters.of_pool(node.pools()[0])]
    assert busy == [0.0] * RANKS
    engine.report(load_bytes_total=(12 << 30) + 4096, load_busy_seconds=501.0)
    sampler.tick()
    (session,) = (await get(client, "/v1/sessions"))["items"]
    assert session["load_bytes_per_second"] > 0
    assert sampler.rank_counters.of_pool(node.pools()[0])[0]["load"] == 1.0


async def test_the_log_has_one_line_for_each_change_of_state(
    launch: Any, node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    await launch(directory=node)
    sampler = launch.state.sampler
    with caplog.at_level(logging.INFO, "kvstow.api"):
        engine = node.attach(NAMES[0], reports=False)
        for _ in range(20):
            sampler.tick()
        engine.report()
        node.memory_status = MemoryStatus(4, 1, "the cgroup's limit is reached")
        for _ in range(20):
            sampler.tick()
    assert [(level, message) for _, level, message in caplog.record_tuples] == [
        (logging.INFO, "the node is ready: 1 pool, 1 session"),
        (logging.INFO, f"pool {NAMES[0]} is ready: all slots are pinned"),
        (
            logging.INFO,
            f"session s1 (fake, pool {NAMES[0]}) is attaching: not all ranks have reported and registered slots",
        ),
        (logging.WARNING, "the node is degraded: memory: the cgroup's limit is reached"),
        (logging.INFO, f"session s1 (fake, pool {NAMES[0]}) is attached: it loads and stores"),
    ]


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
        "process": "running",
        "state": "attached",
        "age_seconds": 2.0,
        "in_flight": 1,
        "oldest_seconds": 2.0,
        "leases": 0,
        "leased_slots": 0,
        "registered_slots": SLOTS,
        "quarantined_slots": 0,
        "processes": 1,
        "load_bytes_per_second": None,
        "store_bytes_per_second": None,
        "ranks": (await get(client, "/v1/ranks"))["items"],
    }
    assert [(one["pid"], one["device"], one["pinned_slots"]) for one in session["ranks"]] == [
        (1001 + rank, f"cuda:{rank}", SLOTS) for rank in range(RANKS)
    ]


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
    node.purged = Purged(40, "disk /a is failed")
    answer = await client.delete(path)
    assert (answer.status_code, answer.json()) == (200, {"stored_blocks": 40, "notice": "disk /a is failed"})
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
        "looked_up_blocks": 0,
        "hit_blocks": 0,
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
    assert [(one["rank"], one["pid"], one["device"], one["pinned_slots"]) for one in session["ranks"]] == [
        (rank, 1000 + rank, f"cuda:{rank}", 16) for rank in range(2)
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
        "failure_kind": None,
        "populate_bytes_per_second": None,
        "granted_bytes": pool_bytes,
        "used_bytes": 2 * 5 * 4096,
        "recalled_bytes": 0,
        "orphaned_bytes": None,
        "waits": [],
        "kept": [],
        "notices": [],
        "keeper": None,
        "keeper_pid": None,
        "unsaved": [],
        "keeper_restarts": 0,
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
        answer = await send_report(client, b"any", headers=headers)
        assert answer.status_code == 401, headers
        assert answer.headers["www-authenticate"].startswith("Bearer")
