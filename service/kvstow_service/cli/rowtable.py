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
_SURE_COLUMNS = 6  # a long name is cut to leave room for them
_SHORTEST_NAME = 16


def row_table(
    rows: Sequence[_R], columns: Mapping[str, str], width: int, most: int, *, noun: str, selected: str | None = None
) -> RenderableType:
    """The first columns that fit, with their titles, and at most `most` lines of rows: those that a condition concerns
    before others. `selected`: the name of a row to mark."""
    chosen = rows if len(rows) <= most else select_rows(rows, max(1, most - 1))
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
        style = "bold" if is_selected else "yellow" if row.troubled else ""
        lines.append(_line(texts, widths[:shown], prefix, style, list(columns).index("state")))
    if len(chosen) < len(rows):
        lines.append(Text(f"and {len(rows) - len(chosen)} more {noun}", style="dim"))
    return Group(*lines)


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
