"""Long-running operations: followed to their end, or cancelled."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.failures import CommandError
from kvstow_service.cli.output import Format, emit, format_flag, table

if TYPE_CHECKING:
    from kvstow_api.answers import OperationView
    from kvstow_api.client import Call, Client

V = TypeVar("V")

no_wait_flag = click.option("--no-wait", is_flag=True, help="Print the operation's id, and do not wait for its end.")


def server_wait(no_wait: bool = False) -> float | None:
    """Seconds for which the server may hold back its answer until the operation has ended; short on a terminal, which
    shows the progress."""
    if no_wait:
        return None
    return 0.25 if sys.stderr.isatty() else 10.0


def follow(client: Client, call: Call[V | OperationView], *, no_wait: bool = False) -> V | OperationView:
    """Send `call`, whose answer may be an operation, and wait for that to end unless `no_wait`.

    Returns the answer or the operation. Raises `CommandError` if the operation failed or was cancelled.
    """
    from kvstow_api.answers import OperationView

    answer = client.send(call)
    if not isinstance(answer, OperationView) or no_wait:
        return answer
    ended = _until_ended(client, answer)
    if ended.state != "succeeded":
        outcome = "failed" if ended.state == "failed" else f"was {ended.state}"
        raise CommandError(
            f"{ended.id} {outcome}: {ended.error or 'no reason given'}",
            f"`kvstow describe operation {ended.id}` shows how far it came",
        )
    return ended


def _until_ended(client: Client, operation: OperationView) -> OperationView:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from kvstow_api.client import calls

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bars:
        bar = bars.add_task(operation.kind, total=None)
        try:
            while operation.state == "running":
                operation = client.send(calls.operation(operation.id, wait=server_wait()))
                waiting = " (waiting for transfers)" if operation.waiting else ""
                done, total = operation.progress.done, operation.progress.total
                bars.update(bar, description=operation.kind + waiting, completed=done, total=total or None)
        except KeyboardInterrupt:
            click.echo(f"{operation.id} is still running; `kvstow cancel {operation.id}` stops it", err=True)
            raise
    return operation


def started(operation: Any) -> str:
    """What to print of an operation that is not waited for."""
    return f"{operation.id} is running; `kvstow describe operation {operation.id}` shows its progress"


@click.command()
@click.argument("operation_id", metavar="ID")
@format_flag
@remote
def cancel(connection: Connection, operation_id: str, style: Format) -> None:
    """Stop a long-running operation. What it has done so far stays done."""
    from kvstow_api.client import calls
    from kvstow_service.cli.tables import OPERATIONS

    with connection.client() as client:
        view = client.send(calls.cancel(operation_id))
    emit(view, style, lambda view: table([view], OPERATIONS))
