"""The doctor of a node."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.api.fakenode import RANKS, SLOT_BYTES, SLOTS, FakeNode
from tests.api.node.conftest import KEYS, NAMES, get

from kvstow.status import MemoryStatus
from kvstow.testing.fakes import FakeClock
from kvstow_api.measurements import OrphanedMemory

pytestmark = pytest.mark.anyio


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
