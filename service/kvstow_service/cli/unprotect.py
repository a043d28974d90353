"""`kvstow unprotect`: let blocks be evicted again."""

from __future__ import annotations

import click

from kvstow_api.numberformat import counted
from kvstow_service.cli.asking import ask, dry_run_flag, keys_of, presence, yes_flag
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.output import Format, emit, format_flag
from kvstow_service.cli.protect import say


@click.command()
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--all", "everything", is_flag=True, help="Unprotect all blocks.")
@dry_run_flag
@yes_flag
@format_flag
@remote
def unprotect(
    connection: Connection, keys: tuple[str, ...], everything: bool, dry_run: bool, yes: bool, style: Format
) -> None:
    """Let blocks be evicted again.

    A KEY is hex text, as `kvstow get blocks` shows it; - reads keys from standard input.
    """
    from kvstow_api.client import calls
    from kvstow_api.views.pools import ProtectionView

    if bool(keys) == everything:
        raise click.UsageError("give keys, or --all")
    with connection.client() as client:
        if everything and (dry_run or not yes):
            protected = client.send(calls.pool()).slots.protected
            if dry_run:
                emit(ProtectionView(changed=protected, missing=0), style, lambda view: say(view, "would unprotect"))
                return
            ask(f"unprotect {counted(protected, 'block')}", yes)
        wanted = None if everything else keys_of(keys)
        if dry_run and wanted is not None:
            present = presence(client, wanted)
            plan = ProtectionView(changed=sum(present), missing=present.count(False))
            emit(plan, style, lambda view: say(view, "would unprotect up to"))
            return
        emit(client.send(calls.unprotect(wanted)), style, lambda view: say(view, "unprotected"))
