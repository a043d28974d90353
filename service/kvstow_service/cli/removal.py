"""What `kvstow evict` and `kvstow purge` have in common: a plan, a question, and the doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvstow.bytesize import format_size
from kvstow_api.numberformat import counted
from kvstow_service.cli.asking import ask
from kvstow_service.cli.connection import Connection
from kvstow_service.cli.output import Format, emit
from kvstow_service.cli.work import patience, run, say_started

if TYPE_CHECKING:
    from kvstow_api.client import Call
    from kvstow_api.views.operations import OperationView
    from kvstow_api.views.pools import RemovedView


def remove(
    connection: Connection,
    make: Callable[..., Call[RemovedView | OperationView]],
    *,
    dry_run: bool,
    yes: bool,
    no_wait: bool,
    style: Format,
) -> None:
    """`make` is one of the client's calls, with all that selects blocks. Prints the plan or what came of it."""
    with connection.client() as client:
        if dry_run or not yes:
            plan = _removed(run(client, make(dry_run=True, wait=patience())))
            if dry_run:
                _print(plan, style)
                return
            ask(f"remove {_amount(plan)}", yes)
        _print(run(client, make(wait=patience(no_wait)), no_wait=no_wait), style)


def _removed(answer: RemovedView | OperationView) -> Any:
    """The result, also of an operation."""
    return getattr(answer, "result", answer)


def _print(answer: RemovedView | OperationView, style: Format) -> None:
    emit(answer, style, _say)


def _say(view: Any) -> None:
    removed = _removed(view)
    if removed is None:
        say_started(view)
    else:
        click.echo(f"{'would remove' if removed.dry_run else 'removed'} {_amount(removed)}")


def _amount(removed: RemovedView) -> str:
    return f"{counted(removed.evicted_slots, 'block')}, {format_size(removed.evicted_bytes)} of each rank"
