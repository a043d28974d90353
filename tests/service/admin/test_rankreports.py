"""Ranks with real data planes and agents, against a real admin server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.embeddedreplay import LocalRank, build_ranks

from kvstow.config import EngineConfig, PoolConfig
from kvstow.control.engine import OffloadEngine
from kvstow_api.app import create_app
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.host import ApiHost
from kvstow_service.admin.agent import AdminAddress, RankAgent
from kvstow_service.admin.ranksocket import RankSocket
from kvstow_service.admin.rendezvous import Rendezvous

SLOT, SLOTS, RANKS = 16 << 10, 32, 2
POOL = PoolConfig(slot_bytes=SLOT, pool_bytes=SLOTS * SLOT, max_bytes=2 * SLOTS * SLOT, chunk_bytes=4 * SLOT, pause=0.0)


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = OffloadEngine(EngineConfig(slot_bytes=SLOT, capacity_slots=SLOTS, num_ranks=RANKS))
    yield engine
    engine.close()


@pytest.fixture
def uds(tmp_path: Path) -> Path:
    return tmp_path / "admin.sock"


@pytest.fixture
def url(engine: OffloadEngine, serving: Any, uds: Path) -> str:
    """Where the server of the engine listens over TCP."""
    host = ApiHost(directory=EmbeddedDirectory(engine, 2 * SLOTS), version="1", mode="vllm", agent_token="secret")
    _, listeners = serving(create_app(host), uds=uds)
    return str(listeners.url)


@pytest.fixture
def client(url: str, uds: Path) -> Iterator[httpx.Client]:
    with httpx.Client(base_url="http://kvstow", transport=httpx.HTTPTransport(uds=str(uds))) as client:
        yield client


@pytest.fixture
def ranks(
    client: httpx.Client, url: str, engine: OffloadEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[LocalRank]]:
    """Ranks that pin and report, the first one as on the engine's host, the other as on another host."""
    ranks = build_ranks(RANKS, POOL, 8)
    rendezvous = Rendezvous("engine", {"XDG_RUNTIME_DIR": str(tmp_path)})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sockets = RankSocket(engine, rendezvous)
    sockets.start()
    agents = []
    for number, rank in enumerate(ranks):
        agents.append(RankAgent(number, rank.worker, rendezvous if number == 0 else lambda: None))
        agents[-1].offer(AdminAddress(url, "secret"))
        agents[-1].start()
        rank.worker.start()
    yield ranks
    for agent in agents:
        agent.stop()
    sockets.stop()
    for rank in ranks:
        rank.worker.close()


def usable_slots(client: httpx.Client) -> int:
    return int(client.get("/v1/readiness").json()["usable_slots"])


def test_ranks_pin_report_and_follow_a_resize(
    client: httpx.Client, ranks: list[LocalRank], engine: OffloadEngine, eventually: Any
) -> None:
    eventually(lambda: usable_slots(client) == SLOTS, "all slots of the first size")
    for capacity in (2 * SLOTS, SLOTS // 2):
        assert client.patch("/v1/pools/host", json={"capacity_slots": capacity}).status_code in (200, 202)
        eventually(lambda wanted=capacity: usable_slots(client) == wanted, f"{capacity} usable slots")
        eventually(lambda wanted=capacity: [r.worker.pool.pinned_slots for r in ranks] == [wanted] * RANKS)
    eventually(lambda: client.get("/readyz").status_code == 200, "readiness")
    engine.check_integrity()
