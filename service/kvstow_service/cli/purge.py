"""`kvstow purge`: forget blocks by name, age or number."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from kvstow_service.cli.asking import dry_run_flag, keys_of, yes_flag
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.output import Format, format_flag
from kvstow_service.cli.removal import remove
from kvstow_service.cli.values import SIZE, TIME
from kvstow_service.cli.work import no_wait_flag


@click.command()
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--all", "everything", is_flag=True, help="Every block.")
@click.option("--key-prefix", "key_prefixes", multiple=True, metavar="HEX", help="Keys that begin so; may be repeated.")
@click.option("--idle", type=TIME, help="All that nobody has used for so long.")
@click.option("--age", type=TIME, help="All that were stored so long ago.")
@click.option("--slots", type=click.IntRange(1), help="So many blocks, the coldest.")
@click.option("--size", type=SIZE, help="So many bytes of each rank, the coldest.")
@dry_run_flag
@yes_flag
@no_wait_flag
@format_flag
@remote
def purge(
    connection: Connection,
    keys: tuple[str, ...],
    everything: bool,
    key_prefixes: tuple[str, ...],
    idle: float | None,
    age: float | None,
    slots: int | None,
    size: int | None,
    dry_run: bool,
    yes: bool,
    no_wait: bool,
    style: Format,
) -> None:
    """Remove blocks by key, age or number, protected ones included.

    A KEY is hex text, as `kvstow get blocks` shows it; - reads keys from standard input. Give one way to choose.
    """
    from kvstow_api.client import calls

    chosen: dict[str, Any] = {
        "everything": everything or None,
        "keys": keys_of(keys) or None,
        "key_prefixes": list(key_prefixes) or None,
        "idle_seconds": idle,
        "age_seconds": age,
        "slots": slots,
        "num_bytes": size,
    }
    given = {name: value for name, value in chosen.items() if value is not None}
    if len(given) != 1:
        raise click.UsageError("give one of KEY..., --all, --key-prefix, --idle, --age, --slots and --size")
    remove(connection, partial(calls.purge, **given), dry_run=dry_run, yes=yes, no_wait=no_wait, style=style)
