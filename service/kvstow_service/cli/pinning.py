"""`kvstow pinning`: how the ranks pin their memory."""

from __future__ import annotations

import click

from kvstow_service.cli.connection import Connection, remote


@click.group()
def pinning() -> None:
    """Pause, resume or retry the pinning of memory."""


@pinning.command()
@remote
def pause(connection: Connection) -> None:
    """Ranks start no further chunk."""
    from kvstow_api.client import calls

    with connection.client() as client:
        client.send(calls.pause_pinning())
    click.echo("pinning is paused")


@pinning.command()
@remote
def resume(connection: Connection) -> None:
    """Ranks go on."""
    from kvstow_api.client import calls

    with connection.client() as client:
        client.send(calls.resume_pinning())
    click.echo("pinning goes on")


@pinning.command()
@remote
def retry(connection: Connection) -> None:
    """Ranks whose pinning failed try again."""
    from kvstow_api.client import calls

    with connection.client() as client:
        attempt = client.send(calls.retry_pinning()).pin_attempt
    click.echo(f"ranks try again: attempt {attempt}")
