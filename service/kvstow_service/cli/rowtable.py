"""A table for a terminal of any size: it omits the columns and rows that do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from kvstow_api.overview import select_rows
from kvstow_api.poolrows import PoolRow
from kvstow_api.sessionrows import SessionRow
from kvstow_api.tierrows import TierRow
from kvstow_service.cli.output import STATE_STYLES

_R = TypeVar("_R", PoolRow, SessionRow, TierRow)

_GAP = 2
_INDENT = 2  # of the line below a row
_SURE_COLUMNS = 6  # a long name is cut to leave room for them
_SHORTEST_NAME = 16


def lines_of(rows: Sequence[_R], width: int) -> int:
    """Lines that all rows take, without the titles."""
    return sum(_height(row, width) for row in rows)


def row_table(
    rows: Sequence[_R], columns: Mapping[str, str], width: int, most: int, *, noun: str, selected: str | None = None
) -> RenderableType:
    """The first columns that fit, with their titles, and at most `most` lines of rows: those in trouble before others.
    `selected`: the name of a row to mark."""
    chosen = rows if lines_of(rows, width) <= most else select_rows(rows, _how_many(rows, width, most - 1))
    mark = 2 if selected is not None else 0
    cells = [[str(getattr(row, field)) for field in columns] for row in chosen]
    titles = [title.upper() for title in columns.values()]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    widths[0] = min(widths[0], max(_SHORTEST_NAME, width - mark - sum(widths[1:_SURE_COLUMNS]) - _GAP * _SURE_COLUMNS))
    ends = accumulate(one + _GAP for one in widths)
    shown = max(1, sum(end - _GAP + mark <= width for end in ends))
    lines = [_line(titles, widths[:shown], " " * mark, "bold cyan", -1)]
    for row, texts in zip(chosen, cells, strict=True):
        is_selected = row.name == selected
        prefix = ("▸ " if is_selected else "  ")[:mark]
        lines.append(_line(texts, widths[:shown], prefix, "bold" if is_selected else "", list(columns).index("state")))
        if row.trouble:
            lines.append(Text(" " * _INDENT + row.trouble, style="red"))
    if len(chosen) < len(rows):
        lines.append(Text(f"and {len(rows) - len(chosen)} more {noun}", style="dim"))
    return Group(*lines)


def _height(row: PoolRow | SessionRow | TierRow, width: int) -> int:
    return 1 + -(-(len(row.trouble) + _INDENT * bool(row.trouble)) // max(width, 1))


def _how_many(rows: Sequence[_R], width: int, most: int) -> int:
    """How many rows fit, those in trouble first."""
    ordered = sorted(rows, key=lambda row: not row.trouble)
    return max(1, sum(end <= most for end in accumulate(_height(row, width) for row in ordered)))


def _line(texts: Sequence[str], widths: Sequence[int], prefix: str, style: str, state: int) -> Text:
    line = Text(prefix, style=style, no_wrap=True, overflow="ellipsis")
    for number, (text, width) in enumerate(zip(texts, widths, strict=False)):
        shown = _cut(text, width).ljust(width + _GAP)
        line.append(shown, STATE_STYLES.get(text) if number == state else None)
    line.rstrip()
    return line


def _cut(text: str, width: int) -> str:
    """A name ends in what distinguishes it from others, so the middle is cut.

    >>> _cut("llama-3-1-8b-instruct-0a1b2c", 20)
    'llama-3-1-8…t-0a1b2c'
    """
    if len(text) <= width:
        return text
    tail = max(1, width * 2 // 5)
    return f"{text[: width - tail - 1]}…{text[-tail:]}"
