"""`kvstow bypass`: switch loads or stores off, and leave the pool as it is."""

from __future__ import annotations

import click

from kvstow_api.numberformat import duration
from kvstow_service.cli.asking import dry_run_flag
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.output import Format, emit, format_flag, print_table
from kvstow_service.cli.values import TIME


@click.command()
@click.option("--load", is_flag=True, help="No loads: every look-up is a miss.")
@click.option("--store", is_flag=True, help="No stores.")
@click.option("--off", is_flag=True, help="Loads and stores again.")
@click.option("--ttl", type=TIME, help="For so long; until --off if it is left out.")
@dry_run_flag
@format_flag
@remote
def bypass(
    connection: Connection, load: bool, store: bool, off: bool, ttl: float | None, dry_run: bool, style: Format
) -> None:
    """Switch loads or stores off, and leave the pool as it is.

    Replaces what was switched off before.
    """
    from kvstow_api.client import calls
    from kvstow_api.views.gate import BypassView
    from kvstow_service.cli.tables import BYPASS

    if off == (load or store) or (off and ttl is not None):
        raise click.UsageError("give --load, --store or both, with or without --ttl; or --off alone")
    if dry_run:
        plan = BypassView(load=load, store=store, ttl_seconds_left=ttl)
        emit(plan, style, lambda _: click.echo(f"would switch {_words(load, store, ttl)}"))
        return
    with connection.client() as client:
        view = client.send(calls.bypass(load=load, store=store, ttl_seconds=ttl))
    emit(view, style, lambda view: print_table([view], BYPASS))


def _words(load: bool, store: bool, ttl: float | None) -> str:
    from kvstow_api.words import bypassed

    off = bypassed(load=load, store=store)
    if not off:
        return "loads and stores on"
    return f"{' and '.join(off)} off" + ("" if ttl is None else f" for {duration(ttl)}")
