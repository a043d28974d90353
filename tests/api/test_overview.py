"""The overview: the one document of the state for those who look."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from tests.api.fakenode import FakeNode
from tests.api.tieredhost import URL, TieredHost
from tests.doubles.fakes import FakeClock

from kvstow.control.engine import OffloadEngine
from kvstow.stats import EngineStats
from kvstow.status import MemoryStatus
from kvstow_api import overview
from kvstow_api.answers import OverviewView
from kvstow_api.figures import PoolHistory, Sample, headline_of
from kvstow_api.overview import INTERVAL, MOST_RANKS, MOST_SESSIONS, pool_to_show

pytestmark = pytest.mark.anyio

KEYS = [bytes([0, 0, number]) for number in range(6)]


async def read(client: httpx.AsyncClient, pool: str | None = None) -> OverviewView:
    answer = await client.get("/v1/overview", params={} if pool is None else {"pool": pool})
    assert answer.status_code == 200
    return msgspec.json.decode(answer.content, type=OverviewView)


@pytest.fixture
def node(clock: FakeClock) -> FakeNode:
    """Two pools with an engine each."""
    node = FakeNode(clock)
    node.attach("a-1").store(KEYS)
    node.attach("b-2").begin_store(KEYS[:2])
    return node


@pytest.mark.parametrize(
    ("pools", "asked", "shown"),
    [
        ([], None, None),
        (["a"], None, "a"),
        (["a", "b"], None, None),
        (["a", "b"], "b", "b"),
        (["a"], "b", None),
    ],
)
def test_the_pool_that_is_shown_is_the_chosen_one_or_the_only_one(
    pools: list[str], asked: str | None, shown: str | None
) -> None:
    assert pool_to_show(pools, asked) == shown


async def test_the_document_has_what_the_routes_of_its_parts_have(
    client: httpx.AsyncClient, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys[:3])
    shown = (await client.get("/v1/overview")).json()
    assert shown["pools"] == (await client.get("/v1/pools")).json()["items"]
    assert shown["stats"] == (await client.get("/v1/stats")).json()
    assert shown["curve"] == (await client.get("/v1/pools/host/curve")).json()
    assert shown["transfers"] == (await client.get("/v1/transfers")).json()
    assert shown["selected"] == "host"
    (session,) = (await client.get("/v1/sessions")).json()["items"]
    figures = {name: value for name, value in session.items() if name not in ("ranks", "age_seconds")}
    assert shown["sessions"] == [{**figures, "num_ranks": 2, "age_seconds": shown["sessions"][0]["age_seconds"]}]
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1]


async def test_a_chosen_pool_narrows_all_but_the_pools(launch: Any, node: FakeNode) -> None:
    client = await launch(directory=node)
    everything, one = await read(client), await read(client, "b-2")
    assert [session.id for session in everything.sessions] == ["s1", "s2"]
    assert (everything.selected, everything.stats, everything.ranks, len(everything.curves)) == (None, None, [], 2)
    assert [session.id for session in one.sessions] == ["s2"]
    assert one.selected == "b-2"
    assert {rank.session for rank in one.ranks} == {"s2"}
    assert one.transfers.pending.stores == 1
    assert [pool.name for pool in one.pools] == ["a-1", "b-2"]
    assert [curve.pool for curve in one.curves] == ["b-2"]


async def test_a_name_that_no_pool_has_is_said(launch: Any, node: FakeNode) -> None:
    shown = await read(await launch(directory=node), "gone")
    assert (shown.is_missing, shown.selected, len(shown.pools)) == (True, None, 2)


async def test_the_document_is_made_once_a_second_for_all(
    launch: Any, node: FakeNode, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str | None] = []
    genuine = overview.read_overview

    def counted(app: Any, asked: str | None = None) -> OverviewView:
        made.append(asked)
        return genuine(app, asked)

    monkeypatch.setattr(overview, "read_overview", counted)
    client = await launch(directory=node)
    for number in range(20):
        for pool in (None, "a-1", f"unknown-{number}"):
            await read(client, pool)
    assert made == [None, "a-1", ""]
    node.switches.drain("all", None)
    clock.advance(INTERVAL)
    assert (await read(client)).state == "draining"


async def test_the_document_is_bounded_and_counts_what_it_leaves_out(launch: Any, clock: FakeClock) -> None:
    node = FakeNode(clock)
    engines = [node.attach("a-1") for _ in range(MOST_SESSIONS + 30)]
    engines[150].control.lose("it ended")
    checks = {f"check{number}": lambda: "it burns" for number in range(40)}
    shown = await read(await launch(directory=node, ready_checks=checks), "a-1")
    assert (len(shown.sessions), shown.omitted["sessions"]) == (MOST_SESSIONS, 30)
    assert "s151" in [session.id for session in shown.sessions], "trouble comes before others"
    assert "s151" in shown.troubled.sessions
    assert len(shown.ranks) == MOST_RANKS


async def test_a_kind_of_condition_is_there_once_with_the_number_of_the_others(launch: Any, clock: FakeClock) -> None:
    node = FakeNode(clock)
    for engine in [node.attach("a-1") for _ in range(3)]:
        engine.report(state="degraded", error="no memory")
    shown = await read(await launch(directory=node))
    names = [one.name for one in shown.conditions]
    assert len(set(names)) == len(names)
    degraded = [one for one in shown.conditions if one.rank is not None]
    assert [(one.session, one.rank, shown.alike[one.name]) for one in degraded] == [("s1", 0, 5)]
    assert shown.troubled.sessions == ["s1", "s2", "s3"]
    assert shown.troubled.ranks == [f"s{session}/{rank}" for session in (1, 2, 3) for rank in (0, 1)]
    assert shown.troubled.pools == ["a-1"]


async def test_kinds_of_conditions_come_with_the_worst_first(launch: Any, clock: FakeClock) -> None:
    """That the first engine is still attaching is a warning. The second one has only begun."""
    node = FakeNode(clock, memory_status=MemoryStatus(4, 4, notices=("memory moves",)))
    for seconds in (1000.0, 0.0):
        node.attach("a-1", reports=False)
        clock.advance(seconds)
        for engine in node.engines:
            engine.report(pinned_slots=0, state="pinning")
    shown = await read(await launch(directory=node))
    kinds = [(one.severity, one.name) for one in shown.conditions if one.name in ("session_attaching", "memory_wait")]
    assert kinds == [("warning", "session_attaching"), ("info", "memory_wait")]
    assert shown.alike["session_attaching"] == 1


async def test_the_latest_events_are_told_in_words(launch: Any, ranks: Any) -> None:
    client = await launch()
    launch.state.sampler.tick()
    await client.put("/v1/bypass", json={"load": False})
    await client.post("/v1/pools/host/evict", json={"slots": 1}, params={"wait": 20})
    shown = [one.words for one in (await read(client)).events]
    assert {"pool host is ready: all slots are pinned", "rank 1 is ready"} <= set(shown)
    assert {"evict in pool host succeeded", "PUT /v1/bypass by uid:1234"} <= set(shown)


async def test_events_are_those_of_the_pool_and_of_the_node(launch: Any, node: FakeNode) -> None:
    client = await launch(directory=node)
    launch.state.sampler.tick()
    words = [one.words for one in (await read(client, "b-2")).events]
    assert any(one.startswith("pool b-2 is ready") for one in words)
    assert not any("a-1" in one for one in words)


async def test_the_document_has_the_store_below_the_pools_and_its_events(
    launch: Any, engine: OffloadEngine, tiered_host: TieredHost, clock: FakeClock, ranks: Any
) -> None:
    client = await launch(directory=tiered_host.directory(16))
    number = tiered_host.begin()
    launch.state.sampler.tick()
    tiered_host.change(number, state="down", reason="no master")
    launch.state.sampler.tick()
    shown = await read(client)
    assert (shown.tier.url, [one.state for one in shown.tier.items]) == (URL, ["down"])
    assert "the store below a1 is down: no master" in [one.words for one in shown.events]


# -- the headline ------------------------------------------------------------------------------------------------------


def sample(time: float, *, queries: int = 0, hits: int = 0, saved: float = 0.0, loads: int = 0) -> Sample:
    from kvstow.config import EngineConfig

    stats: EngineStats = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=16)).stats()
    stats.lookups.query_blocks, stats.lookups.hit_blocks = queries, hits
    stats.prefill.seconds_saved, stats.prefill.hit_tokens = saved, int(saved > 0)
    stats.transfers.choices["async_burst"] = loads
    return Sample(time, stats)


def history(*samples: Sample, num_ranks: int = 1) -> PoolHistory:
    return PoolHistory(num_ranks, num_ranks * 4096, samples, samples)


def test_the_headline_adds_up_the_pools() -> None:
    began = sample(0.0, queries=100, hits=10, saved=2.0, loads=4)
    first = history(began, sample(5.0, queries=200, hits=60, saved=4.0, loads=14), num_ranks=8)
    second = history(sample(0.0), sample(5.0, queries=100, hits=0, saved=1.0, loads=0))
    found = headline_of([first, second])
    assert (found.hit_ratio, found.hit_ratio_ever) == (50 / 200, 60 / 300)
    assert found.gpu_seconds_saved == 8 * 4.0 + 1.0
    assert found.gpu_seconds_saved_per_hour == 3600 * (8 * 2.0 + 1.0) / 5
    assert found.first_token_seconds_saved == 3.0 / 10


def test_the_headline_says_nothing_before_there_is_something_to_say() -> None:
    nothing = headline_of([history(sample(0.0), sample(5.0))])
    assert nothing == replace(headline_of([]), load_bytes_per_second=0.0, store_bytes_per_second=0.0)
