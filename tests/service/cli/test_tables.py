"""The columns of `kvstow get` and `kvstow top`."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from tests.api.test_conditions import RANK, SESSION

from kvstow_api.answers import PoolView
from kvstow_api.figures import NowView
from kvstow_api.openapi import EXAMPLES
from kvstow_service.cli.tables import LISTS, POOLS, SESSIONS, Column, Table, rank_state

POOL = msgspec.convert(EXAMPLES["PoolView"], PoolView)
NOW = NowView(
    seconds=10.0,
    hit_ratio=0.25,
    load_bytes_per_second=3 << 20,
    store_bytes_per_second=1 << 20,
    evicted_blocks_per_second=12.0,
    dropped_blocks_per_second=0.5,
)


def test_the_row_of_a_pool_has_its_memory_on_all_ranks_and_its_figures_of_now() -> None:
    (row,) = Table.of([replace(POOL, sessions=2, now=NOW)], POOLS, lambda pool: False).rows
    assert row.cells == (
        "host", "ready", "16 GiB", "97.7 %", "25.0 %", "2", "3 MiB/s", "1 MiB/s", "0.5/s", "12.0/s", "2",
    )  # fmt: skip


def test_the_row_of_a_session_says_what_it_holds() -> None:
    session = replace(SESSION, leased_slots=3, quarantined_slots=4, in_flight=0, age_seconds=90.0)
    table = Table.of([session], SESSIONS, lambda one: False)
    shown = dict(zip(table.titles, table.rows[0].cells, strict=True))
    wanted = {"session": SESSION.id, "state": "attached", "in flight": "0", "oldest": "-", "holds": "7", "age": "1 min"}
    assert shown.items() >= wanted.items()


@pytest.mark.parametrize(("seconds", "words"), [(59, "< 1 min"), (61, "1 min"), (7320, "2 h 2 min")])
def test_an_age_changes_once_a_minute(seconds: float, words: str) -> None:
    table = Table.of([replace(SESSION, age_seconds=seconds)], SESSIONS, lambda one: False)
    assert table.rows[0].cells[table.titles.index("age")] == words


@pytest.mark.parametrize(("age", "state"), [(None, "ready"), (5.0, "ready"), (12.3, "silent for 12 s")])
def test_a_silent_rank_does_not_show_the_state_that_it_last_reported(age: float | None, state: str) -> None:
    assert rank_state(replace(RANK, last_report_age_seconds=age)) == state


@pytest.mark.parametrize("nothing", [None, ""])
def test_what_is_unknown_is_a_dash(nothing: str | None) -> None:
    assert Column[object]("error", lambda one: nothing).text(object()) == "-"


def test_a_column_can_be_left_out() -> None:
    assert "pool" in Table.of([], SESSIONS, lambda one: False).titles
    assert "pool" not in Table.of([], SESSIONS, lambda one: False, without="pool").titles


def test_rows_in_trouble_are_selected_first() -> None:
    sessions = [replace(SESSION, id=str(number)) for number in range(6)]
    table = Table.of(sessions, SESSIONS, lambda one: one.id == "4").limited(3)
    assert ([row.name for row in table.rows], table.omitted) == (["0", "1", "4"], 3)
    assert table.limited(3) == table


@pytest.mark.parametrize("noun", LISTS)
def test_the_first_column_is_the_name_and_no_title_is_there_twice(noun: str) -> None:
    titles = [column.title for column in LISTS[noun].columns]
    assert len(set(titles)) == len(titles)
    assert LISTS[noun].columns[0].place == "everywhere"
