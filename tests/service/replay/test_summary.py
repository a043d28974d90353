import io
import json
from dataclasses import fields

import pytest
from rich.console import Console

from kvstow_service.replay.result import (
    AttachedResult,
    Copied,
    EngineLife,
    EngineResult,
    Position,
    ReplayResult,
    print_rows,
)


def test_trouble_is_spelled_out() -> None:
    found = ReplayResult(blocks=10, hit_blocks=5, abandoned=2)
    found.drops["dropped_no_slot"] = 4
    found.count_mismatches(["key 01 in block 7, region 3 of rank 1"])
    rows = dict(found.rows())
    assert rows["dropped stores"] == "4 blocks (no_slot 4)"
    assert rows["abandoned"] == "2 requests"
    assert rows["mismatches"] == "1 blocks"
    assert rows["wrong bytes"] == "key 01 in block 7, region 3 of rank 1"


@pytest.mark.parametrize(
    ("waits", "line"),
    [(0, "no look-up waited: the service has no store below its pools"), (1200, "1,200 look-ups waited for the")],
)
def test_an_attached_replay_says_whether_it_met_a_fleet_tier(waits: int, line: str) -> None:
    engines = [EngineResult(f"replay-{count}", [EngineLife(waits=count)]) for count in (0, waits)]
    result = AttachedResult(engines, 2.0)
    assert result.to_json()["waits"] == waits
    assert dict(result.rows())["tier"].startswith(line)


def test_a_rate_is_shown_only_where_bytes_were_moved() -> None:
    rows = dict(ReplayResult(loaded=Copied(1, 3_000_000_000, seconds=2.0)).rows())
    assert rows["loaded"] == "1 blocks, 2.794 GiB, 1.50 GB/s while copying"
    assert rows["stored"] == "0 blocks, 0 B"


def test_a_terminal_gets_a_table_and_a_pipe_gets_lines() -> None:
    rows = [("hit rate", "12 %")]
    pipe, terminal = io.StringIO(), io.StringIO()
    print_rows(rows, Console(file=pipe), title="Replay")
    print_rows(rows, Console(file=terminal, force_terminal=True), title="Replay")
    assert pipe.getvalue() == "hit rate        12 %\n"
    assert "│ hit rate │ 12 % │" in terminal.getvalue()


def test_a_result_with_every_kind_of_value_is_written_as_json() -> None:
    """What a killed service leaves behind included: stores that were dropped, by reason, and lives of an engine."""
    lives = []
    for end in ("killed by SIGKILL", "finished"):
        found = ReplayResult(requests=3, blocks=10, hit_blocks=5, policy="lru", evicted_blocks=2)
        found.drops.update({"dropped_no_slot": 4, "dropped_detached": 1})
        found.count_mismatches(["key 01 in block 7, region 3 of rank 1"])
        lives.append(EngineLife(found, Position((1, 2), 3), problem="the service is away", end=end))
    result = AttachedResult([EngineResult("replay-1", lives)], 2.0)
    assert "; started again: " in dict(result.rows())["replay-1"]
    told = json.loads(json.dumps(result.to_json()))
    assert told["drops"] == {"dropped_no_slot": 8, "dropped_detached": 2}
    assert (told["dropped_stores"], told["restarts"], told["mismatches"]) == (10, 1, 2)
    assert [life["end"] for life in told["engines"][0]["lives"]] == ["killed by SIGKILL", "finished"]
    assert told.keys() >= {field.name for field in fields(ReplayResult)} - {"stored", "loaded"}
    assert told.keys() >= {"stored_bytes", "loaded_bytes", "failed_loads", "failed_stores", "load_gbps", "store_gbps"}
