"""`kvstow top`: the server, live."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstow_service.cli.connection import TIME, Invocation, remote
from kvstow_service.cli.failures import CommandError, ExitCode

if TYPE_CHECKING:
    from kvstow_api.answers import OverviewView
    from kvstow_api.client import Client

_TIMEOUT = 2.0  # seconds for a request; keys are not read meanwhile
_SVG_WIDTH, _SVG_HEIGHT = 120, 44


@click.command()
@click.option("--interval", type=TIME, default="1s", show_default=True, help="Time between updates.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write one picture to this file instead.")
@click.option("--pool", metavar="NAME", help="Begin with this pool; otherwise with all.")
@remote
def top(call: Invocation, interval: float, svg: Path | None) -> None:
    """Watch the server live.

    Shows what is wrong and what mends it, memory, and a row for each pool and for each engine (session). Of one pool it
    also shows ranks, slots by state, hit ratio, bandwidth, transfers in flight and evictions. Where there are
    several pools, the key Tab selects the next one, and everything below the pools then shows that pool only. The key
    a selects all pools again, and q or Ctrl-C ends the command.

    If the server does not answer, the command tries again. Without a terminal it prints the state once.
    """
    interval = max(interval, 0.1)
    connection, pool = call.connection, call.pool
    with replace(connection, timeout=min(connection.timeout, _TIMEOUT)).client() as client:
        server = connection.server
        if svg is None and sys.stdin.isatty() and sys.stdout.isatty():
            _watch(client, interval, server, pool)
        else:
            shown = ask(client, pool)
            if shown.is_missing:
                hint = "`kvstow get pools` lists what there is"
                raise CommandError(f"there is no pool {pool!r}", hint, ExitCode.NOT_FOUND)
            _print(shown, server, svg)


def ask(client: Client, pool: str | None = None) -> OverviewView:
    """Read the overview, of one pool if `pool` is given. Raises `ApiError` if the server does not answer."""
    from kvstow_api.client import routes

    return client.call(routes.get_overview, pool=pool)


def _print(shown: OverviewView, server: str, svg: Path | None) -> None:
    """Print the overview on the terminal, or write it to a file."""
    import io

    from rich.console import Console

    from kvstow_service.cli.board import board

    console = Console(highlight=False)
    if svg is not None:
        console = Console(record=True, file=io.StringIO(), width=_SVG_WIDTH, force_terminal=True, highlight=False)
    console.print(board(shown, None, width=console.width, height=_SVG_HEIGHT, server=server))
    if svg is not None:
        console.save_svg(str(svg), title="kvstow top")


def _watch(client: Client, interval: float, server: str, pool: str | None) -> None:
    from rich.console import Console
    from rich.live import Live

    from kvstow_api.client import ApiError
    from kvstow_service.cli.board import board, pool_choices

    console = Console(highlight=False)
    shown: OverviewView | None = None
    lost: str | None = None
    try:
        with _keyboard() as next_key, Live(console=console, screen=True, auto_refresh=False) as live:
            key: str | None = None
            while key not in ("q", "Q"):
                if key in ("\t", "a") and shown is not None:
                    pool = None if key == "a" else _after(shown.selected, pool_choices(shown))
                try:
                    shown, lost = ask(client, pool), None
                except ApiError as error:
                    lost = str(error)
                width, height = console.size
                choose = "Tab: next pool   a: all pools   " if shown is not None and pool_choices(shown) else ""
                footer = f"{choose}q or Ctrl-C: quit"
                screen = board(shown, lost, width=width, height=height, server=server, footer=footer)
                live.update(screen, refresh=True)
                key = next_key(interval)
    except KeyboardInterrupt:
        return


def _after(selected: str | None, choices: Sequence[str]) -> str | None:
    """Return the pool after the selected one, or None, which selects all pools, after the last one."""
    number = -1 if selected is None else choices.index(selected)
    return choices[number + 1] if number + 1 < len(choices) else None


@contextmanager
def _keyboard() -> Iterator[Callable[[float], str | None]]:
    """Read single keys without echo, and before the end of a line. Yields a function that waits for the next key, for
    at most the given number of seconds. It returns None on timeout, and q if the terminal is gone. Ctrl-C still
    interrupts."""
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)

    def wait(seconds: float) -> str | None:
        ready, _, _ = select.select([stdin], [], [], seconds)
        return (os.read(stdin, 1).decode(errors="replace") or "q") if ready else None

    try:
        yield wait
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
