"""The output of commands: tables and field lists for people, JSON and YAML for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import click
from click.shell_completion import get_completion_class

if TYPE_CHECKING:
    from kvstow_service.cli.tables import Columns

Format = Literal["table", "wide", "name", "json", "yaml"]
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

STATE_STYLES = {
    "ready": "green",
    "on": "green",
    "attached": "green",
    "succeeded": "green",
    "pinning": "cyan",
    "running": "cyan",
    "starting": "cyan",
    "attaching": "cyan",
    "draining": "yellow",
    "degraded": "yellow",
    "warning": "yellow",
    "bypassed": "yellow",
    "down": "red",
    "stuck": "red",
    "lost": "red",
    "failed": "red",
    "error": "red",
    "stopped": "red",
}
"""The colours of states on a terminal, by their names."""

_GAP = "  "


def format_option(choices: Sequence[Format], description: str) -> Decorator:
    """Return the -o option with these choices. The first one is the default."""
    return click.option(
        "-o",
        "--output",
        "style",
        type=click.Choice(choices),
        default=choices[0],
        show_default=True,
        help=description,
    )


format_flag = format_option(("table", "json", "yaml"), "Output format.")
wide_format_flag = format_option(("table", "wide", "json", "yaml"), "Output format; wide shows more.")


def emit(view: Any, style: Format, show: Callable[[Any], str]) -> None:
    """Print `view` in the format `style`. `show` makes the text for people."""
    click.echo(text_of(view, style, show))


def text_of(view: Any, style: Format, show: Callable[[Any], str], *, one_line: bool = False) -> str:
    """Return `view` as text. With `one_line`, JSON has no line breaks, and YAML is a document of a stream."""
    if style == "json":
        return json.dumps(plain(view), indent=None if one_line else 2)
    if style == "yaml":
        import yaml

        text: str = yaml.safe_dump(plain(view), sort_keys=False)
        return ("---\n" if one_line else "") + text.rstrip("\n")
    return show(view)


def plain(view: Any) -> Any:
    """Return the view as JSON and YAML show it, which is equal to the API's answer."""
    match view:
        case Mapping():
            return {key: plain(inner) for key, inner in view.items()}
        case list() | tuple():
            return [plain(inner) for inner in view]
        case datetime():
            return view.isoformat()
        case _ if is_dataclass(view) and not isinstance(view, type):
            return plain(asdict(view))
    return view


def table(items: Iterable[Any], kind: Columns[Any], *, wide: bool = False) -> str:
    """Return a line of titles, and one line for each item. Cells are never folded or cut. A narrow terminal wraps the
    lines, so ids can still be copied."""
    chosen = kind.of("everywhere", "lists", *(("wide",) if wide else ()))
    rows = [[_printable(column.text(item)) for column in chosen] for item in items]
    titles = [column.title.upper() for column in chosen]
    widths = [max(map(_width, cells)) for cells in zip(titles, *rows, strict=True)]
    lines = [_line(titles, widths, lambda title: styled(title, bold=True))]
    lines += [_line(row, widths, lambda cell: styled(cell, STATE_STYLES.get(cell))) for row in rows]
    return "\n".join(lines)


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and values, one pair on each line. The leading blanks of a name show its depth."""
    named = [(name, _printable(value)) for name, value in rows]
    width = max((_width(name) for name, _ in named), default=0)
    return "\n".join(
        _line((name, value), (width, 0), lambda cell: styled(cell, STATE_STYLES.get(cell))) for name, value in named
    )


def styled(text: str, colour: str | None = None, *, bold: bool = False) -> str:
    """Return `text` in a colour if standard output is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return click.style(text, fg=colour, bold=bold or None)


def _line(cells: Sequence[str], widths: Sequence[int], style: Callable[[str], str]) -> str:
    padded = (style(cell) + " " * (width - _width(cell)) for cell, width in zip(cells, widths, strict=True))
    return _GAP.join(padded).rstrip()


def _width(text: str) -> int:
    """Return how many columns of a terminal the text needs."""
    from unicodedata import east_asian_width

    return len(text) if text.isascii() else sum(2 if east_asian_width(char) in "WF" else 1 for char in text)


def _printable(text: str) -> str:
    """Replace line breaks, tabs and terminal escapes, because request ids and error texts come from others."""
    return "".join(char if char.isprintable() else " " for char in text)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that makes the shell complete commands.

    \b
    bash  source <(kvstow completion bash)
    zsh   source <(kvstow completion zsh)
    fish  kvstow completion fish | source
    """
    maker = get_completion_class(shell)
    assert maker is not None
    click.echo(maker(click.get_current_context().find_root().command, {}, "kvstow", "_KVSTOW_COMPLETE").source())
