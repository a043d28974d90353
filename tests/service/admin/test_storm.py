"""Many admin requests, most of them changes, while a replay loads and stores: no error, no wrong byte."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.embeddedreplay import LocalRank, ReplaySession, build_ranks

from kvstow.config import EngineConfig, PoolConfig
from kvstow.control.engine import OffloadEngine
from kvstow_api.app import create_app
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.host import ApiHost
from kvstow_service.admin.adminhost import Ticker
from kvstow_service.admin.agent import AdminAddress, RankAgent
from kvstow_service.admin.server import AdminServer
from kvstow_service.admin.sockets import AdminSockets, TcpAddress
from kvstow_service.replay.driver import blocks_needed
from kvstow_service.replay.result import ReplayResult
from kvstow_service.replay.trace import ReplayOptions, TraceShape, generate_trace

SLOT_BYTES = 4096
SLOTS = 200
RANKS = 2
CLIENTS = 4

TOKEN = "of-people"


class Storm:
    """A whole service in this process, without its signals: engine, two ranks with agents, admin server."""

    def __init__(self, running: ExitStack, token_file: Path) -> None:
        self.requests = generate_trace(TraceShape(sessions=12, turns=3, seed=5), limit=30)
        self.kv_blocks = blocks_needed(self.requests, 4)
        pool = PoolConfig(SLOT_BYTES, SLOTS * SLOT_BYTES, 2 * SLOTS * SLOT_BYTES, chunk_bytes=1 << 18, pause=0.0)
        self.engine = OffloadEngine(EngineConfig(SLOT_BYTES, SLOTS, num_ranks=RANKS))
        self.ranks: list[LocalRank] = build_ranks(RANKS, pool, self.kv_blocks)
        context = ApiHost(
            EmbeddedDirectory(self.engine, 2 * SLOTS), "test", "node", agent_token="agent", token_file=token_file
        )
        listeners = AdminSockets(TcpAddress.resolve("127.0.0.1", 0))
        server = AdminServer(create_app(context), listeners.sockets, pytest.fail)
        ticker = Ticker(self.engine.tick, interval=0.05)
        self.url = listeners.url
        agents = [RankAgent(n, rank.worker, lambda: None) for n, rank in enumerate(self.ranks)]
        for agent in agents:
            agent.offer(AdminAddress(self.url, "agent"))
        running.callback(listeners.close)
        for rank in self.ranks:
            running.callback(rank.worker.close)
            rank.worker.start()
        parts: list[AdminServer | Ticker | RankAgent] = [server, ticker, *agents]
        for part in parts:
            part.start()
            running.callback(part.stop)

    def replay(self, stop: threading.Event) -> Iterator[ReplayResult]:
        """Replays of the trace, one after the other, until `stop`."""
        session = ReplaySession(self.engine, self.ranks)
        while not stop.is_set():
            options = ReplayOptions(concurrency=4, drain_seconds=10.0)
            yield session.driver(self.requests, options, kv_blocks=self.kv_blocks).run(stop)


def random_request(rng: random.Random) -> tuple[str, str, dict[str, Any] | None]:
    keys = [rng.randbytes(1).hex() for _ in range(3)]
    choices: list[tuple[str, str, dict[str, Any] | None]] = [
        ("GET", "/v1/pools/host", None),
        ("GET", "/v1/stats", None),
        ("GET", "/v1/transfers", None),
        ("GET", "/v1/pools/host/blocks?page_size=50", None),
        ("GET", "/metrics", None),
        ("GET", "/readyz?verbose", None),
        ("POST", "/v1/pools/host/evict", {"slots": rng.randint(1, 30)}),
        ("POST", "/v1/pools/host/evict", {"idle_seconds": 0.05}),
        ("POST", "/v1/pools/host/purge", {"key_prefixes": [f"0000{'00' * 27}{key}" for key in keys]}),
        ("POST", "/v1/pools/host/purge", {"all": True} if rng.random() < 0.1 else {"slots": 5}),
        ("PATCH", "/v1/pools/host", {"capacity_slots": rng.randint(SLOTS // 2, 2 * SLOTS)}),
        ("PATCH", "/v1/pools/host", {"policy": rng.choice(["auto", "lru"])}),
        ("PUT", "/v1/bypass", {"load": rng.random() < 0.2, "store": rng.random() < 0.2, "ttl_seconds": 0.02}),
    ]
    return rng.choice(choices)


def send_requests(url: str, seed: int, count: int) -> Counter[str]:
    """What was answered, by status; books that do not add up count as "unbalanced"."""
    rng = random.Random(seed)
    answers: Counter[str] = Counter()
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30.0) as client:
        for _ in range(count):
            method, path, body = random_request(rng)
            response = client.request(method, path, json=body)
            answers[str(response.status_code)] += 1
            if response.status_code == 503 and not path.startswith("/readyz"):  # which says so if the loop lagged
                answers["unexplained"] += response.json()["code"] != "queue_full"
            if (method, path) == ("GET", "/v1/pools/host"):
                pool = response.json()
                answers["unbalanced"] += sum(pool["slots"].values()) != pool["usable_slots"]
                answers["pages"] += 1
    return answers


@pytest.mark.process
@pytest.mark.parametrize("requests", [1000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_storm_of_changes_under_a_replay_corrupts_no_byte(tmp_path: Path, requests: int) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with ExitStack() as running:
        storm = Storm(running, token)
        stop = threading.Event()
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            replays = pool.submit(lambda: list(storm.replay(stop)))
            clients = [pool.submit(send_requests, storm.url, seed, requests // CLIENTS) for seed in range(CLIENTS)]
            try:
                answers = sum((client.result() for client in clients), Counter[str]())
            finally:
                stop.set()
        results = replays.result()
        assert answers["unbalanced"] == 0
        assert answers["pages"] > 0
        # 409: another resize; 503: as many operations as may run at a time
        assert {status for status in answers if status.isdigit()} <= {"200", "202", "409", "503"}
        assert answers["unexplained"] == 0
        assert sum(count for status, count in answers.items() if status.isdigit()) == requests
        assert sum(result.loaded.blocks for result in results) > 0
        assert sum(result.mismatches for result in results) == 0
        stats = storm.engine.stats()
        assert stats.evictions["operator"] > 0
        assert stats.evictions["resize"] > 0
        assert (stats.pool.leases, stats.transfers.pending.loads, stats.transfers.pending.stores) == (0, 0, 0)
        storm.engine.check_integrity()
