"""What the commands print: tables for people, JSON and YAML for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import click

if TYPE_CHECKING:
    from rich.console import Console

    from kvstow_api.views.base import View

Format = Literal["table", "wide", "json", "yaml"]

STATE_STYLES = {
    "ready": "green",
    "succeeded": "green",
    "pinning": "cyan",
    "running": "cyan",
    "starting": "cyan",
    "draining": "yellow",
    "degraded": "yellow",
    "warning": "yellow",
    "stuck": "red",
    "failed": "red",
    "error": "red",
    "stopped": "red",
}
"""Colours of the names of states, on a terminal."""

_PIPE_WIDTH = 1000  # no line is folded that another program is to read

format_flag: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "-o",
    "--output",
    "style",
    type=click.Choice(get_args(Format)),
    default="table",
    show_default=True,
    help="wide has more columns.",
)


class Column(NamedTuple):
    """One column of a table: what is written into it of an item. `wide`: only where there is room."""

    title: str
    cell: Callable[[Any], str]
    wide: bool = False


def console() -> Console:
    """Standard output: no colours with NO_COLOR or in a pipe."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def emit(view: View, style: Format, show: Callable[[View], None]) -> None:
    """Print `view` as it is, or as `show` does for people."""
    if style == "json":
        click.echo(json.dumps(plain(view), indent=2))
    elif style == "yaml":
        import yaml

        click.echo(yaml.safe_dump(plain(view), sort_keys=False), nl=False)
    else:
        show(view)


def plain(view: View) -> Any:
    """As JSON and YAML have it; the same as the API's answer."""
    return _plain(asdict(view))  # type: ignore[call-overload]


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {key: _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case datetime():
            return value.isoformat()
    return value


def print_table(items: Iterable[Any], columns: Sequence[Column], *, wide: bool = False) -> None:
    """A line for each item, below the titles."""
    from rich.table import Table
    from rich.text import Text

    chosen = [column for column in columns if wide or not column.wide]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in chosen:
        table.add_column(column.title, no_wrap=not sys.stdout.isatty(), overflow="fold")
    for item in items:
        cells = [column.cell(item) for column in chosen]
        table.add_row(*(Text(cell, style=STATE_STYLES.get(cell, "")) for cell in cells))
    _print_lines(table)


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Names and values below each other; leading blanks of a name are its depth."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", no_wrap=not sys.stdout.isatty())
    for name, value in pairs:
        table.add_row(
            Text(name, style="" if name.startswith(" ") else "bold"), Text(value, STATE_STYLES.get(value, ""))
        )
    _print_lines(table)


def _print_lines(table: Any) -> None:
    """In a pipe without the blanks that make columns equal on a screen."""
    out = console()
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as lines:
        out.print(table)
    click.echo("\n".join(line.rstrip() for line in lines.get().splitlines()))
