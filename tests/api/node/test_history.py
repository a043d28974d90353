"""What a node remembers and tells: curves, its journal, its events."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.api.fakenode import RANKS, SLOTS, FakeNode
from tests.api.node.conftest import KEYS, NAMES, get

from kvstow_api.journal import Journal
from kvstow_api.streams import EventStreams

pytestmark = pytest.mark.anyio


async def test_curves_are_of_pools_and_end_with_them(launch: Any, node: FakeNode) -> None:
    client = await launch(directory=node)
    sampler = launch.state.sampler
    node.attach(NAMES[0]).store(KEYS)
    node.attach(NAMES[1])
    for _ in range(6):
        sampler.tick()
    curves = (await get(client, "/v1/overview"))["curves"]
    assert [{len(one) for one in each["points"].values()} for each in curves] == [{1}, {1}]
    assert [sampler.of_pool(name).kept[-1].stats.stores["stored"] for name in NAMES[:2]] == [4, 0]
    node.end(node.engines[0])
    node.delete_pool(NAMES[0])
    node.attach(NAMES[0])  # another life of it
    sampler.tick()
    (curve,) = (await get(client, f"/v1/overview?pool={NAMES[0]}"))["curves"]
    assert all(points == [] for points in curve["points"].values())
    assert [one.stats.stores["stored"] for one in sampler.of_pool(NAMES[0]).kept] == [0]


async def test_the_journal_names_pools_and_sessions(launch: Any, node: FakeNode) -> None:
    await launch(directory=node)
    state = launch.state
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
    await launch(directory=node)
    state = launch.state
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
