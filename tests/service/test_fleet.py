"""The ranks of the service with their agents, against a real admin server in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvstow.config import EngineConfig, PoolConfig
from kvstow.control.engine import OffloadEngine
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import PinError
from kvstow.messages import Op, StepPlan
from kvstow_api.app import create_app
from kvstow_api.embeddeddirectory import EmbeddedDirectory
from kvstow_api.host import ApiHost
from kvstow_service.agent import AdminAddress, RankAgent
from kvstow_service.fleet import Fleet, UnbuiltRank
from kvstow_service.replay import ranks as ranks_module

SLOT = 16 << 10
SLOTS = 32
POOL = PoolConfig(slot_bytes=SLOT, pool_bytes=SLOTS * SLOT, max_bytes=2 * SLOTS * SLOT, chunk_bytes=4 * SLOT, pause=0.0)
RANKS = 2


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = OffloadEngine(EngineConfig(slot_bytes=SLOT, capacity_slots=SLOTS, num_ranks=RANKS))
    yield engine
    engine.close()


@pytest.fixture
def client(engine: OffloadEngine, serving: Any) -> Iterator[httpx.Client]:
    context = ApiHost(
        directory=EmbeddedDirectory(engine, 2 * SLOTS), version="1", mode="standalone", agent_token="secret"
    )
    _, listeners = serving(create_app(context))
    with httpx.Client(base_url=listeners.url) as client:
        yield client


@pytest.fixture
def fleet(client: httpx.Client) -> Iterator[Fleet]:
    fleet = Fleet(RANKS, POOL, 8, AdminAddress(str(client.base_url), "secret"))
    yield fleet
    fleet.close()


def usable_slots(client: httpx.Client) -> int:
    return int(client.get("/v1/readiness").json()["usable_slots"])


def test_the_ranks_pin_report_and_follow_a_resize(
    client: httpx.Client, fleet: Fleet, engine: OffloadEngine, eventually: Any
) -> None:
    fleet.start()
    eventually(lambda: usable_slots(client) == SLOTS, "all slots of the first size")
    ranks = fleet.ranks()
    assert ranks is not None
    for capacity in (2 * SLOTS, SLOTS // 2):
        assert client.patch("/v1/pools/host", json={"capacity_slots": capacity}).status_code in (200, 202)
        eventually(lambda wanted=capacity: usable_slots(client) == wanted, f"{capacity} usable slots")
        eventually(lambda wanted=capacity: [r.worker.pool.pinned_slots for r in ranks] == [wanted] * RANKS)
    assert client.get("/readyz").status_code == 200
    engine.check_integrity()


def test_close_is_idempotent_and_leaves_no_thread_and_no_memory(
    client: httpx.Client, fleet: Fleet, eventually: Any
) -> None:
    fleet.start()
    eventually(lambda: usable_slots(client) > 0)
    ranks = fleet.ranks()
    assert ranks is not None
    fleet.close()
    fleet.close()
    assert [rank.worker.report().pinned_bytes for rank in ranks] == [0, 0]

    def left(*names: str) -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith(names)}

    assert not left("kvstow-copy", "kvstow-pin", "kvstow-fleet")
    eventually(lambda: not left("kvstow-agent"), "the end of the agents, for which nothing waits")


def test_one_that_was_never_started_can_be_closed_and_has_no_ranks(fleet: Fleet) -> None:
    fleet.close()
    assert fleet.ranks() is None


def test_closing_while_a_rank_is_built_waits_for_it_and_builds_no_other(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    built: list[Any] = []
    entered, release = threading.Event(), threading.Event()
    build_rank = ranks_module.build_rank

    def build_slowly(*args: Any) -> Any:
        entered.set()
        release.wait(30)
        built.append(build_rank(*args))
        return built[-1]

    monkeypatch.setattr(ranks_module, "build_rank", build_slowly)
    fleet.start()
    assert entered.wait(30)
    closer = threading.Thread(target=fleet.close)
    closer.start()
    eventually(fleet._closing.is_set)
    release.set()
    closer.join()
    assert [rank.worker.report().state for rank in built] == ["stopped"]
    assert fleet.ranks() is None


def test_a_thread_that_cannot_be_started_is_logged(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(agent: RankAgent) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(RankAgent, "start", refuse)
    fleet.start()
    assert fleet.ranks() is None
    assert "can't start new thread" in caplog.text


def test_a_rank_that_cannot_be_built_says_why_and_the_others_go_on(
    client: httpx.Client, fleet: Fleet, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_rank = ranks_module.build_rank

    def build_first_only(rank: int, *args: Any) -> Any:
        if rank:
            raise PinError("out_of_memory", "no address space")
        return build_rank(rank, *args)

    monkeypatch.setattr(ranks_module, "build_rank", build_first_only)
    fleet.start()
    assert fleet.ranks() is None

    def states() -> list[str]:
        return [rank["state"] for rank in client.get("/v1/ranks").json()["items"]]

    eventually(lambda: states() == ["ready", "failed"], "both ranks' states")
    answer = client.get("/readyz?verbose")
    assert answer.status_code == 503
    assert "rank 1 is failed (pin_failed: no address space)" in answer.text
    assert client.get("/livez").status_code == 200


def test_a_copy_thread_that_dies_turns_readiness_red_with_the_reason(
    client: httpx.Client, fleet: Fleet, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: Any) -> None:
        raise SystemExit("the device is gone")

    fleet.start()
    ranks = fleet.ranks()
    assert ranks is not None
    eventually(lambda: client.get("/readyz").status_code == 200, "readiness")
    eventually(lambda: ranks[1].worker.pool.pinned_slots, "a slot to store into")
    monkeypatch.setattr(CpuDevice, "launch_store", die)
    ranks[1].worker.submit(StepPlan((Op(1, "store", (0,), (0,)),)))
    eventually(lambda: client.get("/readyz").status_code == 503, "a red readiness")
    text = client.get("/readyz?verbose").text
    assert "rank 1 is failed" in text
    assert "the device is gone" in text
    assert client.get("/livez").status_code == 200


def test_a_defect_in_building_is_reported_as_internal() -> None:
    report = UnbuiltRank(3, POOL, ZeroDivisionError()).report()
    assert (report.rank, report.state, report.error_reason) == (3, "failed", "internal")
    assert report.error == "ZeroDivisionError()"
