"""`kvstow top`: the server, live."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.valuetypes import TIME

if TYPE_CHECKING:
    from kvstow_api.client import Client
    from kvstow_service.cli.snapshot import Snapshot

_PATIENCE = 2.0  # for an answer: a key is not heeded meanwhile
_SVG_WIDTH, _SVG_HEIGHT = 110, 40


@click.command()
@click.option("--interval", type=TIME, default="1s", show_default=True, help="Look so often.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write one look to this file instead.")
@remote
def top(connection: Connection, interval: float, svg: Path | None) -> None:
    """Watch the server live.

    Pinned memory of each rank, slots by state, hit ratio, bandwidth, what is in flight, evictions. Goes on when the
    server is away for a while. q or Ctrl-C ends it. Without a terminal it prints one look.
    """
    from kvstow_service.cli.snapshot import look

    interval = max(interval, 0.1)
    with replace(connection, timeout=min(connection.timeout, _PATIENCE)).client() as client:
        server = connection.context.server
        if svg is not None:
            _draw(look(client), server, svg)
        elif sys.stdin.isatty() and sys.stdout.isatty():
            _watch(client, interval, server)
        else:
            _print(look(client), server)


def _print(snapshot: Snapshot, server: str) -> None:
    from rich.console import Console

    from kvstow_service.cli.board import board

    console = Console(highlight=False)
    console.print(board(snapshot, None, width=console.width, height=_SVG_HEIGHT, server=server))


def _draw(snapshot: Snapshot, server: str, path: Path) -> None:
    import io

    from rich.console import Console

    from kvstow_service.cli.board import board

    console = Console(record=True, file=io.StringIO(), width=_SVG_WIDTH, force_terminal=True, highlight=False)
    console.print(board(snapshot, None, width=_SVG_WIDTH, height=_SVG_HEIGHT, server=server))
    console.save_svg(str(path), title="kvstow top")


def _watch(client: Client, interval: float, server: str) -> None:
    from rich.console import Console
    from rich.live import Live

    from kvstow_api.client import ApiError
    from kvstow_service.cli.board import board
    from kvstow_service.cli.keyboard import Keyboard
    from kvstow_service.cli.snapshot import look

    console = Console(highlight=False)
    snapshot: Snapshot | None = None
    lost: str | None = None
    try:
        with Keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
            key: str | None = None
            while key not in ("q", "Q"):
                if key is None:
                    try:
                        snapshot, lost = look(client), None
                    except ApiError as error:
                        lost = str(error)
                width, height = console.size
                live.update(board(snapshot, lost, width=width, height=height, server=server), refresh=True)
                key = keyboard.wait(interval)
    except KeyboardInterrupt:
        return
