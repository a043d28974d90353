"""`kvstow describe`: one thing at full length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.output import print_pairs


@click.group()
def describe() -> None:
    """Show one thing at full length."""


def _noun(name: str) -> Callable[[Callable[..., None]], click.Command]:
    return lambda function: describe.command(name)(remote(function))


@_noun("server")
def server(connection: Connection) -> None:
    """What the server is, how it is, and what it is doing."""
    from kvstow_api.client import calls

    _show(
        connection,
        server=calls.info(),
        readiness=calls.readiness(),
        drain=calls.drain_status(),
        bypass=calls.bypass_status(),
        running_operations=calls.operations(state="running"),
    )


@_noun("pool")
@click.argument("name", default="host")
def pool(connection: Connection, name: str) -> None:
    """A pool: its slots by state, and what became of blocks."""
    from kvstow_api.client import calls

    _show(connection, pool=calls.pool(name), blocks=calls.stats("stores", "evictions", "lookups"))


@_noun("rank")
@click.argument("number", type=int)
def rank(connection: Connection, number: int) -> None:
    """A rank as it last reported."""
    from kvstow_api.client import calls

    _show(connection, rank=calls.rank(number))


@_noun("block")
@click.argument("key")
def block(connection: Connection, key: str) -> None:
    """A block in the pool."""
    from kvstow_api.client import calls

    _show(connection, block=calls.block(key))


@_noun("operation")
@click.argument("operation_id", metavar="ID")
def operation(connection: Connection, operation_id: str) -> None:
    """A long-running operation."""
    from kvstow_api.client import calls

    _show(connection, operation=calls.operation(operation_id))


def _show(connection: Connection, **sections: Any) -> None:
    """All or nothing: every section is there before the first is printed."""
    from kvstow_service.cli.details import entry_of

    with connection.client() as client:
        views = {title: client.send(call) for title, call in sections.items()}
    for number, (title, view) in enumerate(views.items()):
        if number:
            click.echo()
        print_pairs(entry_of(title, getattr(view, "items", view)))
