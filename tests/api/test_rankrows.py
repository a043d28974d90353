"""The row of a rank, on the status page and in `kvstow top`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.api.test_conditions import GIB
from tests.api.test_conditions import RANK as PLAIN

from kvstow.status import RankStatus
from kvstow_api.rankrows import RankRow, rank_rows, select_ranks

RANK = replace(PLAIN, pool="a", session="s1")


def line_of(rank: RankStatus) -> RankRow:
    (line,) = rank_rows([rank])
    return line


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "8 GiB"),
        ({"pinned_bytes": 2 * GIB}, "2 GiB of 8 GiB"),
        (
            {"pinned_bytes": 2 * GIB, "state": "pinning", "pin_rate_bytes_per_second": GIB / 2},
            "2 GiB of 8 GiB, 512 MiB/s, 12 s left",
        ),
        ({"pinned_bytes": 2 * GIB, "state": "pinning", "pin_rate_bytes_per_second": 12.0 * GIB}, "2 GiB of 8 GiB"),
        ({"pinned_bytes": 2 * GIB, "state": "degraded", "pin_rate_bytes_per_second": GIB / 2}, "2 GiB of 8 GiB"),
    ],
)
def test_the_remaining_time_is_shown_for_a_rank_that_pins(changes: dict[str, Any], told: str) -> None:
    assert line_of(replace(RANK, **changes)).progress == told


def test_no_remaining_time_is_shown_while_pinning_is_paused() -> None:
    rank = replace(RANK, pinned_bytes=2 * GIB, state="pinning", pin_rate_bytes_per_second=GIB / 2)
    (line,) = rank_rows([rank], pinning_paused=True)
    assert line.progress == "2 GiB of 8 GiB"


def test_a_rank_shows_its_host_pid_and_device() -> None:
    assert line_of(replace(RANK, host=None, pid=None, device=None)).place == ""
    assert line_of(replace(RANK, host="node-7", pid=4711, device=None)).place == "node-7, pid 4711"
    assert line_of(replace(RANK, host="node-7", pid=4711, device="cuda:1")).place == "node-7, pid 4711, cuda:1"


@pytest.mark.parametrize(("age", "state"), [(None, "ready"), (5.0, "ready"), (12.3, "silent for 12 s")])
def test_a_silent_rank_does_not_show_the_state_that_it_last_reported(age: float | None, state: str) -> None:
    assert line_of(replace(RANK, last_report_age_seconds=age)).state == state


def test_ranks_in_trouble_are_selected_first() -> None:
    ranks = [replace(RANK, rank=number, pinned_bytes=number * GIB) for number in range(6)]
    rows = rank_rows(ranks, troubled={(RANK.session, 5)})
    assert [rank.rank for rank in select_ranks(rows, 3)] == [0, 1, 5]


def test_ranks_of_several_sessions_are_told_apart() -> None:
    ranks = [replace(RANK, session=session, host="node-7", pid=1, device=None) for session in ("s1", "s2")]
    assert [row.place for row in rank_rows(ranks)] == ["s1, node-7, pid 1", "s2, node-7, pid 1"]
    assert [row.place for row in rank_rows(ranks[:1])] == ["node-7, pid 1"]
