"""The rows of `kvstow top` on terminals of all sizes."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from kvstow_api.answers import PoolView
from kvstow_api.openapi import EXAMPLES
from kvstow_service.cli.board import row_table
from kvstow_service.cli.tables import POOLS, Table

POOL = msgspec.convert(EXAMPLES["PoolView"], PoolView)
LONG = "deepseek-r1-distill-qwen-32b-instruct-awq-0a1b2c"


def rows(number: int, *, troubled: bool = False) -> Table:
    names = [f"{LONG[:-2]}{index:02}" for index in range(number)]
    return Table.of([replace(POOL, name=name) for name in names], POOLS, lambda one: troubled and one.name == names[-1])


def drawn(shown: Table, width: int, most: int, selected: str | None = None) -> list[str]:
    console = Console(width=width, record=True, file=StringIO())
    console.print(row_table(shown, width, most, noun="pools", selected=selected))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 110, 160, 300])
def test_no_line_is_wider_than_the_terminal_or_wrapped(width: int) -> None:
    titles, *lines = drawn(rows(3), width, 10, selected=rows(1).rows[0].name)
    assert len(lines) == 3
    assert all(len(line) <= width for line in (titles, *lines))


def test_a_wide_terminal_shows_every_column_and_a_narrow_one_the_first() -> None:
    assert drawn(rows(1), 300, 10)[0].split("  ")[0] == "POOL"
    every = drawn(rows(1), 300, 10)[0]
    assert all(title.upper() in every for title in rows(1).titles)
    narrow = drawn(rows(1), 80, 10)[0]
    assert all(title in narrow for title in ("POOL", "STATE", "MEMORY", "USED", "HITS", "IN FLIGHT"))
    assert "EVICTED" not in narrow


def test_a_name_that_is_cut_keeps_the_end_that_tells_it_apart() -> None:
    _, line = drawn(rows(1), 70, 10)
    assert "…" in line.split()[0]
    assert line.split()[0].endswith("0a1b00")
