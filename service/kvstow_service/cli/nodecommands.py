"""Commands on what a node has: detach an engine, delete a pool."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from kvstow_api.numberformat import counted
from kvstow_service.cli.confirmation import Effect, confirm, dry_run_flag, yes_flag
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.failures import CommandError, ExitCode
from kvstow_service.cli.output import Format, emit, format_flag
from kvstow_service.cli.poolflag import find_session

if TYPE_CHECKING:
    from kvstow.status import SessionStatus
    from kvstow_api.answers import DetachView, PoolView


@click.command()
@click.argument("session_id", metavar="SESSION")
@click.option("--kill", is_flag=True, help="Kill its processes, too.")
@dry_run_flag
@yes_flag
@format_flag
@remote
def detach(connection: Connection, session_id: str, kill: bool, dry_run: bool, yes: bool, style: Format) -> None:
    """Detach an engine from the node.

    Its connections end at once, and it serves without the cache until it attaches again. What it holds is freed when
    its processes have ended, and not before, because until then they may still copy: --kill ends them. SESSION is an id
    of `kvstow get sessions`.
    """
    from kvstow_api.client import calls

    with connection.client() as client:
        session = find_session(client, session_id)
        if dry_run:
            emit(session, style, partial(_would_detach, kill))
            return
        confirm(Effect(f"{_words(session, kill)},", ends_engine=True), connection, yes)
        emit(client.send(calls.detach(session_id, kill=kill)), style, _detached)


def _words(session: SessionStatus, kill: bool) -> str:
    name = f"session {session.id} ({session.engine}, pool {session.pool})"
    return f"detach {name}" + (" and kill its processes" if kill else "")


def _would_detach(kill: bool, session: SessionStatus) -> str:
    held = session.leased_slots + session.quarantined_slots
    return f"would {_words(session, kill)}; it has {counted(session.in_flight, 'transfer')} in flight and holds " + (
        f"{counted(held, 'slot')}"
    )


def _detached(view: DetachView) -> str:
    how = "its processes are killed" if view.killed else "its processes were left alone"
    return f"session {view.id} is detached, and {how}; it is gone from `kvstow get sessions` when they have ended"


@click.group()
def delete() -> None:
    """Delete a pool that no engine uses."""


@delete.command()
@click.argument("name")
@dry_run_flag
@yes_flag
@format_flag
@remote
def pool(connection: Connection, name: str, dry_run: bool, yes: bool, style: Format) -> None:
    """Delete a pool with all its blocks.

    Its memory is for other pools as soon as no process can reach it. Exit code 5 while sessions use the pool.
    """
    from kvstow_api.client import calls

    with connection.client() as client:
        now = client.send(calls.pool(name))
        if now.sessions:
            uses = f"{counted(now.sessions, 'session')} {'uses' if now.sessions == 1 else 'use'}"
            raise CommandError(
                f"{uses} pool {name}", "`kvstow get sessions` lists them; detach them first", ExitCode.CONFLICT
            )
        if dry_run:
            emit(now, style, lambda view: f"would delete pool {name} and {_blocks(view)}")
            return
        confirm(Effect(f"delete pool {name} and {_blocks(now)},", lost_blocks=None), connection, yes)
        client.send(calls.delete_pool(name))
    click.echo(f"deleted pool {name}")


def _blocks(pool: PoolView) -> str:
    return counted(pool.slots.cached + pool.slots.leased + pool.slots.protected, "block")
