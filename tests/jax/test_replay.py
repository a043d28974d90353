"""`kvstow replay --device jax`: the same traffic and the same verification as on other devices."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Event
from typing import Any

import jax
import pytest
from click.testing import CliRunner

from kvstow.config import EngineConfig
from kvstow.devices.jax.rangecopier import CopyJob, RangeCopier
from kvstow_service.cli import app
from kvstow_service.replay.driver import ReplayDriver, blocks_needed
from kvstow_service.replay.offload import EmbeddedOffload
from kvstow_service.replay.pace import ReplayOptions
from kvstow_service.replay.place import Place
from kvstow_service.replay.result import ReplayResult
from kvstow_service.replay.session import local_session
from kvstow_service.replay.shapes import even_shape
from kvstow_service.replay.trace import read_trace

pytestmark = pytest.mark.jax


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Conversations that take turns; each turn is the one before and six more blocks."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 0,
            "input_length": 512 * 6 * turn,
            "output_length": 1,
            "hash_ids": [1000 * conversation + block for block in range(6 * turn)],
        }
        for turn in range(1, 6)
        for conversation in range(6)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replay(trace: Path, ranks: int, slot_bytes: int, concurrency: int) -> ReplayResult:
    requests = read_trace(str(trace))
    config = EngineConfig(slot_bytes=slot_bytes, capacity_slots=100, num_ranks=ranks)
    kv_blocks = blocks_needed(requests, concurrency)
    place = Place("jax", even_shape(slot_bytes))
    with local_session(config, kv_blocks=kv_blocks, stop=Event(), place=place) as session:
        options = ReplayOptions(concurrency=concurrency)
        driver = ReplayDriver(
            EmbeddedOffload(session.engine),
            session.workers,
            session.kv,
            requests,
            options,
            kv_blocks=kv_blocks,
            wait=session.wait,
        )
        result = driver.run(Event())
        session.engine.check_integrity()
    return result


@pytest.mark.parametrize(("ranks", "slot_bytes", "concurrency"), [(1, 4096, 1), (len(jax.devices()), 4099, 4)])
def test_every_loaded_byte_is_right(trace: Path, ranks: int, slot_bytes: int, concurrency: int) -> None:
    result = replay(trace, ranks, slot_bytes, concurrency)
    assert (result.requests, result.mismatches, result.failed_loads) == (30, 0, 0)
    assert result.verified_bytes == result.loaded_bytes == result.loaded_blocks * slot_bytes * ranks > 0
    assert result.evicted_blocks
    assert "torch" not in sys.modules


def test_bytes_that_were_not_copied_are_noticed(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RangeCopier, "start", lambda self, ranges: CopyJob())
    result = replay(trace, 1, 4096, 1)
    assert result.mismatches == result.loaded_blocks > 0


def test_the_command_replays_on_jax(trace: Path) -> None:
    arguments = ["replay", str(trace), "--device", "jax", "--pool-slots", "100", "--slot-size", "4096", "--json"]
    result: Any = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["mismatches"] == 0
    assert figures["loaded_blocks"] > 0
