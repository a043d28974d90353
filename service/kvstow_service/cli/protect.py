"""`kvstow protect`: keep blocks from eviction."""

from __future__ import annotations

from typing import Any

import click

from kvstow_api.numberformat import counted
from kvstow_service.cli.asking import dry_run_flag, keys_of, presence
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.exits import CommandError, ExitCode
from kvstow_service.cli.output import Format, emit, format_flag
from kvstow_service.cli.values import TIME


@click.command()
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@click.option("--ttl", type=TIME, help="How long; without it, until `kvstow unprotect`.")
@dry_run_flag
@format_flag
@remote
def protect(connection: Connection, keys: tuple[str, ...], ttl: float | None, dry_run: bool, style: Format) -> None:
    """Protect blocks from eviction.

    A KEY is hex text, as `kvstow get blocks` shows it; - reads keys from standard input. Replaces any earlier
    protection. Exit code 4 if none of the keys is in the pool.
    """
    from kvstow_api.client import calls
    from kvstow_api.views.pools import ProtectionView

    wanted = keys_of(keys)
    with connection.client() as client:
        present = presence(client, wanted)
        if not any(present):
            fix = "`kvstow get blocks` lists what is there"
            raise CommandError(
                f"not in the pool: {counted(len(wanted), 'key')}, all that were given", fix, ExitCode.NOT_FOUND
            )
        if dry_run:
            plan = ProtectionView(changed=sum(present), missing=present.count(False))
            emit(plan, style, lambda view: say(view, "would protect"))
        else:
            emit(client.send(calls.protect(wanted, ttl_seconds=ttl)), style, lambda view: say(view, "protected"))


def say(view: Any, verb: str) -> None:
    """Print a `ProtectionView`."""
    missing = f"; not in the pool: {counted(view.missing, 'key')}" if view.missing else ""
    click.echo(f"{verb} {counted(view.changed, 'block')}{missing}")
