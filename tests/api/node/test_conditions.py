"""The conditions of a node."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.api.fakenode import MODEL, RANKS, SLOT_BYTES, SLOTS, FakeNode
from tests.api.node.conftest import KEYS, NAMES, get
from tests.api.tieredhost import ShownTiers
from tests.doubles.fakes import FakeClock

from kvstow.status import KeptMemory, MemoryStatus, MemoryWait, UserLimit
from kvstow.tier.blockstore import PartCounters
from kvstow_api.directory import OrphanedMemory
from kvstow_api.sampler import CORRUPT_SECONDS, REJECTED_SECONDS

pytestmark = pytest.mark.anyio


async def test_the_doctor_of_a_node(client: httpx.AsyncClient, pools: list[str]) -> None:
    told = await get(client, "/v1/doctor")
    assert told["conditions"] == []
    assert told["healthy"]
    assert {"node_memory", "orphaned_memory", "trust_eof"} <= set(told["checked"])
    if not pools:
        assert told["skipped"]["thrashing"] == "no engine has attached yet, so there is no pool"


async def test_the_doctor_names_what_is_wrong(launch: Any, node: FakeNode, clock: FakeClock) -> None:
    orphans = [OrphanedMemory(7, "python", 2, 2 << 20), *(OrphanedMemory(pid, "vllm", 1, 0) for pid in range(8, 14))]
    client = await launch(directory=node, orphaned_memory=lambda: orphans)
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
    found = {one["name"]: one for one in (await get(client, "/v1/doctor"))["conditions"]}
    assert {name: one["severity"] for name, one in found.items()} == {
        "node_memory": "error",
        "orphaned_memory": "warning",
        "rank_silent": "error",
        "session_stuck": "error",
        "session_lost": "warning",
        "sharing": "info",
        "trust_eof": "warning",
        "drain": "warning",
    }
    assert found["session_stuck"]["what"].startswith(f"session s1 (fake, pool {NAMES[0]}) is stuck")
    assert "`kvstow detach s1 --kill`" in found["session_stuck"]["fix"]
    assert found["session_lost"]["evidence"] == {"processes": 1, "held_slots": len(KEYS)}
    assert found["orphaned_memory"]["what"] == (
        "7 processes on this machine have memory that no running service has (2 MiB): 7 (python), 8 (vllm), 9 (vllm), "
        "10 (vllm), 11 (vllm), 2 more"
    )
    assert "`ps -o user,lstart,args -p 7,8,9,10,11`" in found["orphaned_memory"]["fix"]
    assert "end the" not in found["orphaned_memory"]["fix"], "they may be engines that serve"
    assert "its keys are not reproducible" in found["sharing"]["what"]
    assert "--trust-eof" in found["trust_eof"]["what"]
    assert found["drain"]["what"].startswith(f"pool {NAMES[1]}: the pool drains (mode all)")
    assert (found["drain"]["pool"], found["drain"]["fix"]) == (
        NAMES[1],
        f"`kvstow undrain --pool {NAMES[1]}` lets it serve again, unless its process is about to stop",
    )
    assert (found["session_stuck"]["session"], found["rank_silent"]["session"]) == ("s1", "s1")
    assert found["trust_eof"]["pool"] is None


async def test_a_rank_that_is_stopped_is_told_by_everything(
    client: httpx.AsyncClient, node: FakeNode, clock: FakeClock
) -> None:
    """As a process that got SIGSTOP, while nothing is in flight: no transfer would become stuck."""
    engine = node.attach(NAMES[0])
    clock.advance(12.0)
    engine.report_rank(0)
    (one,) = (await get(client, "/v1/doctor"))["conditions"]
    assert (one["name"], one["severity"], one["session"], one["rank"]) == ("rank_silent", "error", "s1", 1)
    assert one["what"] == f"pool {NAMES[0]}: rank 1 of session s1 (pid 1002 on node) has been silent for 12 s"
    assert (await get(client, "/v1/readiness"))["conditions"] == [one]
    assert f"[-]ranks failed: {one['what']} (informational)" in (await client.get("/readyz?verbose")).text
    assert one in (await client.get("/v1/overview")).json()["conditions"]
    series = f'kvstow_condition{{condition="rank_silent",model="{MODEL}",pool="{NAMES[0]}",severity="error"}} 1.0'
    assert series in (await client.get("/metrics")).text


async def test_an_engine_whose_process_is_stopped_is_told_while_it_has_nothing_to_do(
    client: httpx.AsyncClient, node: FakeNode
) -> None:
    engine = node.attach(NAMES[0])
    engine.process = "stopped"
    (one,) = (await get(client, "/v1/doctor"))["conditions"]
    assert (one["name"], one["severity"], one["session"], one["pool"]) == ("session_stopped", "error", "s1", NAMES[0])
    assert one["what"] == f"the process of session s1 (fake, pool {NAMES[0]}) is stopped (pid 1000 on node)"
    assert one["fix"].startswith("`kill -CONT 1000` on node")
    engine.process = "unknown"
    doctor = await get(client, "/v1/doctor")
    assert doctor["conditions"] == []
    assert "does not see the processes" in doctor["skipped"]["session_stopped"]


async def test_the_check_of_the_tier_is_there_although_the_tier_comes_after_the_server(
    client: httpx.AsyncClient, node: FakeNode
) -> None:
    assert (await client.get("/readyz/tier")).status_code == 404
    node.tier = ShownTiers(NAMES[0])
    assert (await client.get("/readyz/tier")).status_code == 200
    assert "[+]tier ok (informational)" in (await client.get("/readyz?verbose")).text


async def test_stores_that_are_dropped_are_told(launch: Any, node: FakeNode) -> None:
    client = await launch(directory=node)
    engine, state = node.attach(NAMES[0]), launch.state
    state.sampler.tick()
    keys = [b"\x00\x00" + bytes([number]) * 4 for number in range(3 * SLOTS)]
    engine.begin_store(keys)
    state.sampler.tick()
    (one,) = (await get(client, "/v1/doctor"))["conditions"]
    assert (one["name"], one["pool"]) == ("stores_dropped", NAMES[0])
    assert one["what"] == (
        f"pool {NAMES[0]}: {2 * SLOTS} of {2 * SLOTS} blocks were not stored in the last seconds: "
        f"every slot is in use ({SLOTS} being filled)"
    )


async def test_a_pool_that_waits_for_memory_names_who_holds_it(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.attach(NAMES[0])
    for seconds, severity in ((3.0, "info"), (11.0, "warning")):
        node.memory_status = MemoryStatus(4, 4, waits=(MemoryWait("b", "s1", 2 << 30, seconds),))
        (one,) = (await get(client, "/v1/doctor"))["conditions"]
        assert (one["name"], one["severity"], one["pool"], one["session"]) == ("memory_wait", severity, "b", "s1")
    assert one["what"] == f"pool b waits for 2 GiB that session s1 (fake, pool {NAMES[0]}) holds"
    assert "`kvstow detach s1`" in one["fix"], "it lives, and serves"


async def test_memory_that_was_given_back_and_that_somebody_has_still_names_the_session(
    client: httpx.AsyncClient, node: FakeNode
) -> None:
    node.attach(NAMES[0])
    for seconds, severity in ((3.0, "info"), (11.0, "warning")):
        node.memory_status = MemoryStatus(
            4, 4, kept=(KeptMemory(("s1",), 2 << 30, seconds), KeptMemory((), 1 << 30, seconds))
        )
        one, other = (await get(client, "/v1/doctor"))["conditions"]
        assert (one["name"], one["severity"], one["session"]) == ("memory_kept", severity, "s1")
        assert (other["name"], other["severity"], other["session"]) == ("memory_kept", severity, None)
        node.memory_status = MemoryStatus(4, 4, kept=(KeptMemory(("s7",), 1 << 30, seconds),))
        (left,) = (await get(client, "/v1/doctor"))["conditions"]
        assert left["what"] == "some process still has 1 GiB that session s7, which has detached, has given back"
        assert "`kvstow detach s7 --kill`" in left["fix"]
    assert one["what"] == f"some process still has 2 GiB that session s1 (fake, pool {NAMES[0]}) has given back"
    assert one["fix"].endswith("`kvstow detach s1 --kill` ends it and its requests at once")
    assert other["what"] == "some process still has 1 GiB that an engine that is gone has given back"


async def test_a_user_that_holds_as_much_as_one_may_is_named_with_the_sessions(
    client: httpx.AsyncClient, node: FakeNode
) -> None:
    node.attach(NAMES[0])
    node.limits = (
        UserLimit(1001, "processes of lost sessions", 64, 64, ("s1", "s2")),
        UserLimit(1002, "connections", 8, 8, ()),
    )
    one, other = (await get(client, "/v1/doctor"))["conditions"]
    assert (one["name"], one["severity"], one["session"]) == ("user_limit", "warning", "s1")
    assert one["what"] == (
        "engines of uid 1001 hold 64 processes of lost sessions, and may hold 64; among them: "
        f"session s1 (fake, pool {NAMES[0]})"
    )
    assert one["fix"] == "ask this user to end engines on the node: `ps -u 1001` shows the processes", "this one serves"
    assert one["evidence"] == {"held": 64, "most": 64}
    assert (other["session"], other["what"]) == (None, "engines of uid 1002 hold 8 connections, and may hold 8")


async def test_populating_tells_its_pace_and_the_time_left(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.memory_status = MemoryStatus(4 << 30, 1 << 30, populate_bytes_per_second=float(1 << 30) / 8)
    words = "1 GiB of 4 GiB of memory are populated, 128 MiB/s, about 24 s left"
    (one,) = (await get(client, "/v1/doctor"))["conditions"]
    assert (one["name"], one["what"]) == ("populating", words)
    assert (await get(client, "/v1/readiness"))["reason"] == words


async def test_an_engine_that_does_not_attach_is_told(launch: Any, node: FakeNode, clock: FakeClock) -> None:
    client = await launch(directory=node, startup_grace=10.0)
    engine = node.attach(NAMES[0], reports=False)

    async def told() -> tuple[str, str]:
        found = {one["name"]: one for one in (await get(client, "/v1/doctor"))["conditions"]}
        return found["session_attaching"]["severity"], found["session_attaching"]["what"].partition("yet: ")[2]

    assert await told() == ("info", "not all ranks have reported")
    engine.report(pinned_slots=0)
    engine.report_rank(0)
    assert await told() == ("info", "no slot is registered on rank 1")
    clock.advance(10.0)
    assert await told() == ("warning", "no slot is registered on rank 1")


async def test_the_doctor_tells_the_ranks_of_several_engines_apart(client: httpx.AsyncClient, node: FakeNode) -> None:
    moved = {"load_bytes_total": 4 << 30}
    for name, busy, notice in ((NAMES[0], 1.0, None), (NAMES[0], 9.0, None), (NAMES[1], 9.0, "bound to no NUMA node")):
        node.attach(name).report(**moved, load_busy_seconds=busy, notice=notice)
    found = (await get(client, "/v1/doctor"))["conditions"]
    links = [one for one in found if one["name"] == "links"]
    assert [(one["pool"], one["session"], one["rank"]) for one in links] == [
        (NAMES[0], "s2", rank) for rank in range(RANKS)
    ]
    assert links[0]["what"].startswith(f"pool {NAMES[0]}: rank 0 of session s2 loads at")
    numa = [one for one in found if one["name"] == "numa"]
    assert {(one["pool"], one["session"]) for one in numa} == {(NAMES[1], "s3")}
    assert len(found) == 2 * RANKS


async def test_the_doctor_knows_memory_the_keeper_and_who_was_rejected(launch: Any, node: FakeNode) -> None:
    client = await launch(directory=node)
    node.attach(NAMES[0])
    node.memory_status = MemoryStatus(4, 4, keeper="connected", notices=("pool b gets no memory yet: ...",))
    sampler = launch.state.sampler
    node.rejected["identity"] = 7
    sampler.tick()
    node.rejected["version"] = 3
    node.granted_bytes = SLOT_BYTES

    async def conditions() -> dict[str, Any]:
        return {one["name"]: one for one in (await get(client, "/v1/doctor"))["conditions"]}

    found = await conditions()
    assert {check: one["severity"] for check, one in found.items()} == {
        "share": "warning",
        "memory_wait": "info",
        "rejected": "warning",
    }
    assert (found["share"]["pool"], found["share"]["evidence"]["granted_bytes"]) == (NAMES[0], SLOT_BYTES)
    assert found["memory_wait"]["what"] == "pool b gets no memory yet: ..."
    assert found["rejected"]["evidence"] == {"rejected_version": 3}
    node.memory_status = MemoryStatus(4, 4, keeper="gone", unsaved=("there is no keeper",))
    node.granted_bytes = RANKS * SLOTS * SLOT_BYTES
    assert {check: one["severity"] for check, one in (await conditions()).items()} == {
        "keeper": "warning",
        "rejected": "warning",
    }
    for _ in range(round(REJECTED_SECONDS)):
        sampler.tick()
    assert set(await conditions()) == {"keeper"}


async def test_a_disk_that_has_changed_bytes_is_told_for_a_day(launch: Any, node: FakeNode) -> None:
    """If it were told for ever, only a restart would end the alert, and may cost the cache."""
    client = await launch(directory=node)
    tiers = node.tier = ShownTiers(NAMES[0])
    sampler = launch.state.sampler
    sampler.tick()

    async def is_told() -> bool:
        return "tier_objects" in {one["name"] for one in (await get(client, "/v1/doctor"))["conditions"]}

    assert not await is_told()
    tiers.part = replace(tiers.part, counters=PartCounters(corrupt_blocks=3))
    assert await is_told()
    sampler.tick()
    assert await is_told()
    for _ in range(round(CORRUPT_SECONDS)):
        sampler.tick()
    assert not await is_told()


@pytest.mark.parametrize("state", ["gone", "silent", "connected"])
async def test_nobody_is_told_to_restart_a_service_whose_memory_would_not_survive(
    client: httpx.AsyncClient, node: FakeNode, state: Any
) -> None:
    unsaved = ("the index of pool a would not survive",)
    node.memory_status = MemoryStatus(4, 4, keeper=state, keeper_pid=812, unsaved=unsaved)
    (one,) = (await get(client, "/v1/doctor"))["conditions"]
    assert (one["name"], one["severity"], one["what"]) == ("keeper", "warning", "the index of pool a would not survive")
    assert "Leave the service running" in one["fix"]
    assert ("`kill -CONT 812`" in one["fix"]) == (state == "silent")
    assert (await client.get("/readyz/memory")).status_code == 200, "the node has all of its memory"


async def test_why_memory_is_lacking_decides_what_is_told_to_do(client: httpx.AsyncClient, node: FakeNode) -> None:
    fixes = {}
    for kind in ("refused", "engine", "defect"):
        node.memory_status = MemoryStatus(4, 1, "something", kind)
        (one,) = (await get(client, "/v1/doctor"))["conditions"]
        fixes[kind] = one["fix"]
    assert len({*fixes.values()}) == 3
    assert "--memory" in fixes["refused"]
    assert not any("--memory" in fixes[kind] or "restart" in fixes[kind] for kind in ("engine", "defect"))


async def test_a_switch_of_the_node_is_found_once(client: httpx.AsyncClient, node: FakeNode) -> None:
    for name in NAMES:
        node.attach(name)
    node.switches.drain("all", None)
    node.switches.set_bypass(load=True, store=False, ttl_seconds=None)
    found = [one["what"] for one in (await get(client, "/v1/doctor"))["conditions"]]
    assert found == ["the node drains (mode all): nothing is in flight", "loads are bypassed"]


async def test_conditions_are_logged_when_they_begin_and_end(
    launch: Any, node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped engine changes no state, so only its condition can be in the log."""
    await launch(directory=node)
    conditions, engine = launch.state.conditions, node.attach(NAMES[0])
    caplog.set_level(logging.INFO, "kvstow.conditions")
    conditions.log_changes()
    assert [one for one in caplog.records if one.name == "kvstow.conditions"] == []
    engine.process = "stopped"
    for _ in range(3):
        conditions.log_changes()
    (begun,) = (one for one in caplog.records if one.name == "kvstow.conditions")
    assert begun.levelno == logging.ERROR
    assert begun.getMessage().startswith("session_stopped: the process of session s1 ")
    assert f"`kill -CONT {engine.pid}`" in begun.getMessage()
    engine.process = "running"
    conditions.log_changes()
    assert caplog.records[-1].getMessage().startswith("session_stopped is over, which said: the process of session s1 ")


async def test_a_condition_that_comes_and_goes_has_few_lines(
    launch: Any, node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    await launch(directory=node)
    caplog.set_level(logging.INFO, "kvstow.conditions")
    conditions, engine = launch.state.conditions, node.attach(NAMES[0])
    for number in range(20):
        engine.process = "running" if number % 2 else "stopped"
        conditions.log_changes()
    assert len([one for one in caplog.records if one.name == "kvstow.conditions"]) == 2
