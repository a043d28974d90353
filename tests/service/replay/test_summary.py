import io
from dataclasses import replace

import pytest
from rich.console import Console

from kvstow_service.replay.kv import Mismatch
from kvstow_service.replay.launcher import AttachedResult, EngineResult
from kvstow_service.replay.offload import PoolCounts
from kvstow_service.replay.result import ReplayResult, Tally
from kvstow_service.replay.summary import attached_rows, print_rows, summary_rows


def freeze(tally: Tally) -> ReplayResult:
    return tally.freeze(PoolCounts(1000, "arc", 3), seconds=2.0, ranks=2)


def test_trouble_is_spelled_out() -> None:
    tally = Tally(blocks=10, hit_blocks=5, abandoned=2)
    tally.drops["dropped_no_slot"] = 4
    tally.count_mismatches([Mismatch(b"\x01", 1, 3, 7)])
    rows = dict(summary_rows(freeze(tally)))
    assert rows["dropped stores"] == "4 blocks (no_slot 4)"
    assert rows["abandoned"] == "2 requests"
    assert rows["mismatches"] == "1 blocks"
    assert rows["wrong bytes"] == "key 01 in block 7, region 3 of rank 1"


@pytest.mark.parametrize(
    ("waits", "line"), [(0, "no look-up waited for the service: it has no"), (1200, "1,200 look-ups waited for the")]
)
def test_an_attached_replay_says_whether_it_met_a_fleet_tier(waits: int, line: str) -> None:
    engine = EngineResult("replay-1", freeze(Tally()), (), 1, 0.0, None, waits)
    result = AttachedResult(freeze(Tally()), (replace(engine, waits=0), engine))
    assert result.to_json()["waits"] == waits
    assert dict(attached_rows(result))["tier"].startswith(line)


def test_a_rate_is_shown_only_where_bytes_were_moved() -> None:
    tally = Tally(loaded_blocks=1, loaded_bytes=3_000_000_000, load_seconds=2.0)
    rows = dict(summary_rows(freeze(tally)))
    assert rows["loaded"] == "1 blocks, 2.794 GiB, 1.50 GB/s while copying"
    assert rows["stored"] == "0 blocks, 0 B"


def test_a_terminal_gets_a_table_and_a_pipe_gets_lines() -> None:
    rows = [("hit rate", "12 %")]
    pipe, terminal = io.StringIO(), io.StringIO()
    print_rows(rows, Console(file=pipe), title="Replay")
    print_rows(rows, Console(file=terminal, force_terminal=True), title="Replay")
    assert pipe.getvalue() == "hit rate        12 %\n"
    assert "│ hit rate │ 12 % │" in terminal.getvalue()
