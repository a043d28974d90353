"""`kvstow drain`: let what is in flight end, and take nothing new."""

from __future__ import annotations

from typing import Any

import click

from kvstow_service.cli.asking import ask, dry_run_flag, yes_flag
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.output import Format, emit, format_flag, print_table
from kvstow_service.cli.values import TIME

_QUESTIONS = {
    "all": "stop loads and stores, and fail /readyz",
    "stop-stores": "stop stores, and fail /readyz",
}


@click.command()
@click.option(
    "--mode",
    type=click.Choice(list(_QUESTIONS)),
    default="all",
    show_default=True,
    help="all: neither loads nor stores; stop-stores: loads go on.",
)
@click.option(
    "--deadline",
    type=TIME,
    help="For those who wait: `kvstow get drain` shows what is left. Nothing is broken off by it.",
)
@dry_run_flag
@yes_flag
@format_flag
@remote
def drain(connection: Connection, mode: str, deadline: float | None, dry_run: bool, yes: bool, style: Format) -> None:
    """Let what is in flight end, and take nothing new.

    Requests are served all the same, without the cache. /readyz fails until `kvstow undrain`;
    `kvstow wait --for=drained` waits for the end.
    """
    from kvstow_api.client import calls
    from kvstow_service.cli.tables import DRAIN

    with connection.client() as client:
        if dry_run:
            emit(client.send(calls.drain_status()), style, lambda view: _say_plan(view, mode))
            return
        ask(_QUESTIONS[mode], yes)
        wanted: Any = mode.replace("-", "_")
        emit(
            client.send(calls.drain(mode=wanted, deadline_seconds=deadline)),
            style,
            lambda view: print_table([view], DRAIN),
        )


def _say_plan(view: Any, mode: str) -> None:
    click.echo(
        f"would {_QUESTIONS[mode]}; {view.pending_transfers:,} transfers and {view.leases:,} leases are in flight"
    )
