"""`kvstow cancel`: end a long-running operation."""

from __future__ import annotations

import click

from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.output import Format, emit, format_flag, print_table


@click.command()
@click.argument("operation_id", metavar="ID")
@format_flag
@remote
def cancel(connection: Connection, operation_id: str, style: Format) -> None:
    """End a long-running operation; what it has done stays done."""
    from kvstow_api.client import calls
    from kvstow_service.cli.tables import OPERATIONS

    with connection.client() as client:
        view = client.send(calls.cancel(operation_id))
    emit(view, style, lambda view: print_table([view], OPERATIONS))
