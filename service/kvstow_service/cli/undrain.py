"""`kvstow undrain`: take traffic again."""

from __future__ import annotations

from typing import Any

import click

from kvstow_service.cli.asking import dry_run_flag
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.output import Format, emit, format_flag, print_table


@click.command()
@dry_run_flag
@format_flag
@remote
def undrain(connection: Connection, dry_run: bool, style: Format) -> None:
    """Take traffic again."""
    from kvstow_api.client import calls
    from kvstow_service.cli.tables import DRAIN

    with connection.client() as client:
        if dry_run:
            emit(client.send(calls.drain_status()), style, _say_plan)
        else:
            emit(client.send(calls.undrain()), style, lambda view: print_table([view], DRAIN))


def _say_plan(view: Any) -> None:
    click.echo("would end the drain" if view.active else "would change nothing: no drain is on")
