"""The benchmark of agents, on a small trace."""

from __future__ import annotations

from math import log
from pathlib import Path

import pytest
from bench.agents import CLIENTS, Client, run
from tests.service.replay.sessions import agents

from kvstow.hints import Hints, context_id
from kvstow_service.replay.importing import Importer, ImportOptions
from kvstow_service.replay.trace import TraceRequest


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    importer = Importer(ImportOptions(share_system=True, spread=1200.0))
    path = folder / "agents.jsonl"
    path.write_text("".join(f"{one.to_line()}\n" for one in importer.read([str(agents(folder / "sessions", 15))])))
    return path


def test_each_size_has_a_row_and_each_kind_of_client_a_column(trace: Path) -> None:
    said: list[str] = []
    hits, written = run(trace, [100, 400], CLIENTS, None, said.append)
    assert list(hits.head) == list(written.head) == ["slots", *CLIENTS]
    assert [row[0] for row in hits.rows] == ["100 (6.25 GiB)", "400 (25 GiB)"]
    for row in hits.rows:
        *found, best = map(float, row[1:])
        assert 0 < min(found) <= max(found) <= best
    assert len(said) == 2 * len(CLIENTS)
    assert all(int(cell.replace(",", "")) > 0 for row in written.rows for cell in row[1:-1])


def test_a_gpu_before_the_pool_only_adds_hits(trace: Path) -> None:
    alone, _ = run(trace, [100], ["lru"], None, lambda line: None)
    behind, _ = run(trace, [100], ["lru", "min"], 400, lambda line: None)
    assert list(behind.head) == ["slots", "lru"], "foresight knows no cache before the pool"
    assert float(behind.rows[0][1]) > float(alone.rows[0][1])


def test_without_a_trace_it_says_how_to_get_one(tmp_path: Path) -> None:
    said: list[str] = []
    assert run(tmp_path / "none.jsonl.gz", [400], CLIENTS, None, said.append) == []
    assert f"kvstow trace import kv-cache-tester/traces --share-system --output {tmp_path}/none.jsonl.gz" in said[0]


def test_clients_say_when_they_come_back_as_well_as_they_know() -> None:
    first = TraceRequest(0, 1, 1, (1,), end=1000, context="a")
    requests = [first, TraceRequest(500, 1, 1, (2,)), first._replace(timestamp=9000, end=9500)]
    name = context_id("a")
    said = {kind: [Client(kind, requests).hints(number) for number in range(3)] for kind in CLIENTS}
    assert said["nothing said"] == said["lru"] == [None, None, None]
    assert said["names"] == [Hints(name), None, Hints(name)]
    assert said["exact"] == [Hints(name, 8.0), None, Hints(name, release=True)]
    rough = said["rough"][0]
    assert rough is not None
    assert rough.resume_in is not None
    assert 0 < abs(log(rough.resume_in / 8.0)) < 4
