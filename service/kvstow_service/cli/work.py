"""Long-running operations: started by one command, followed to their end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvstow_service.cli.exits import CommandError

if TYPE_CHECKING:
    from kvstow_api.client import Call, Client
    from kvstow_api.views.operations import OperationView

V = TypeVar("V")

no_wait_flag: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--no-wait", is_flag=True, help="Do not wait for the end: say the operation's id."
)


def patience(no_wait: bool = False) -> float | None:
    """For how many seconds the server may hold an answer back until the work is done: shortly where somebody wants to
    see how far it is."""
    if no_wait:
        return None
    return 0.25 if sys.stderr.isatty() else 10.0


def run(client: Client, call: Call[V | OperationView], *, no_wait: bool = False) -> V | OperationView:
    """Send `call`, whose answer may be an operation, and follow that to its end.

    Returns the answer, or the operation: ended well, or as it is with `no_wait`. Raises `CommandError` for one that
    failed or was cancelled.
    """
    from kvstow_api.views.operations import OperationView

    answer = client.send(call)
    if not isinstance(answer, OperationView) or no_wait:
        return answer
    ended = _follow(client, answer)
    if ended.state != "succeeded":
        words = f"{ended.id} has {ended.state}" if ended.state == "failed" else f"{ended.id} was {ended.state}"
        raise CommandError(
            f"{words}: {ended.error or 'no reason given'}",
            f"`kvstow describe operation {ended.id}` says how far it came",
        )
    return ended


def _follow(client: Client, operation: OperationView) -> OperationView:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from kvstow_api.client import calls

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bars:
        bar = bars.add_task(operation.kind, total=None)
        try:
            while operation.state == "running":
                operation = client.send(calls.operation(operation.id, wait=patience()))
                waiting = " (waiting for transfers)" if operation.waiting else ""
                done, total = operation.progress.done, operation.progress.total
                bars.update(bar, description=operation.kind + waiting, completed=done, total=total)
        except KeyboardInterrupt:
            click.echo(f"{operation.id} goes on; `kvstow cancel {operation.id}` ends it", err=True)
            raise
    return operation


def say_started(operation: Any) -> None:
    """That an operation runs, and how to see how far it is."""
    click.echo(f"{operation.id} is running; `kvstow get operations {operation.id}` shows how far it is")
