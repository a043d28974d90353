"""`kvstow evict`: give room back."""

from __future__ import annotations

from functools import partial

import click

from kvstow_service.cli.asking import dry_run_flag, yes_flag
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.output import Format, format_flag
from kvstow_service.cli.removal import remove
from kvstow_service.cli.values import SIZE, TIME
from kvstow_service.cli.work import no_wait_flag


@click.command()
@click.option("--slots", type=click.IntRange(1), help="So many blocks.")
@click.option("--size", type=SIZE, help="So many bytes of each rank, such as 2GiB.")
@click.option("--idle", type=TIME, help="All that nobody has used for so long.")
@dry_run_flag
@yes_flag
@no_wait_flag
@format_flag
@remote
def evict(
    connection: Connection,
    slots: int | None,
    size: int | None,
    idle: float | None,
    dry_run: bool,
    yes: bool,
    no_wait: bool,
    style: Format,
) -> None:
    """Remove the coldest blocks.

    Blocks that are leased or protected stay. Give one of --slots, --size and --idle.
    """
    from kvstow_api.client import calls

    if sum(given is not None for given in (slots, size, idle)) != 1:
        raise click.UsageError("give one of --slots, --size and --idle")
    make = partial(calls.evict, slots=slots, num_bytes=size, idle_seconds=idle)
    remove(connection, make, dry_run=dry_run, yes=yes, no_wait=no_wait, style=style)
