import io

from rich.console import Console

from kvstow_service.replay.kv import Mismatch
from kvstow_service.replay.offload import PoolFigures
from kvstow_service.replay.result import ReplayResult, Tally
from kvstow_service.replay.summary import print_rows, summary_rows


def freeze(tally: Tally) -> ReplayResult:
    return tally.freeze(PoolFigures(1000, "arc", 3), seconds=2.0, ranks=2)


def test_trouble_is_spelled_out() -> None:
    tally = Tally(blocks=10, hit_blocks=5, abandoned=2)
    tally.drops["dropped_no_slot"] = 4
    tally.count_mismatches([Mismatch(b"\x01", 1, 3, 7)])
    rows = dict(summary_rows(freeze(tally)))
    assert rows["dropped stores"] == "4 blocks (no_slot 4)"
    assert rows["abandoned"] == "2 requests"
    assert rows["mismatches"] == "1 blocks"
    assert rows["wrong bytes"] == "key 01 in block 7, region 3 of rank 1"


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
