"""`kvstow resize`: give the pool another size while it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvstow.bytesize import format_size
from kvstow_api.numberformat import counted
from kvstow_service.cli.asking import ask, dry_run_flag, yes_flag
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.exits import CommandError, ExitCode
from kvstow_service.cli.output import Format, emit, format_flag
from kvstow_service.cli.values import SIZE
from kvstow_service.cli.work import no_wait_flag, patience, run, say_started

if TYPE_CHECKING:
    from kvstow_api.views.pools import PoolView


@click.command()
@click.argument("size", type=SIZE, required=False)
@click.option("--slots", type=click.IntRange(1), help="So many slots in place of a size.")
@dry_run_flag
@yes_flag
@no_wait_flag
@format_flag
@remote
def resize(
    connection: Connection,
    size: int | None,
    slots: int | None,
    dry_run: bool,
    yes: bool,
    no_wait: bool,
    style: Format,
) -> None:
    """Give the pool of every rank SIZE bytes, such as 16GiB.

    Growing pins in the background. Shrinking evicts the coldest blocks first, and asks before.
    """
    from kvstow_api.client import calls

    if (size is None) == (slots is None):
        raise click.UsageError("give a size, or --slots")
    with connection.client() as client:
        pool = client.send(calls.pool())
        _check_size(size if size is not None else (slots or 0) * pool.slot_bytes, pool)
        plan = client.send(calls.plan_resize(slots=slots, num_bytes=size))
        if dry_run:
            emit(plan, style, _say_plan)
            return
        if plan.evicted_slots:
            loss = f"evicts {counted(plan.evicted_slots, 'block')}, {format_size(plan.evicted_bytes)} of each rank"
            ask(f"shrink the pool to {plan.capacity_slots:,} slots, which {loss}", yes)
        change = calls.resize(slots=slots, num_bytes=size, if_match=pool.etag, wait=patience(no_wait))
        answer = run(client, change, no_wait=no_wait)
        emit(answer, style, lambda view: _say(view, plan.capacity_slots, pool.capacity_slots))


def _check_size(size: int, pool: PoolView) -> None:
    """The server would refuse it, too, in bytes."""
    if size > pool.max_capacity_bytes:
        most = f"{format_size(pool.max_capacity_bytes)}, {counted(pool.max_capacity_slots, 'slot')}"
        fix = "ask for less, or restart the server with a larger --pool-max-size (max_bytes inside vLLM)"
        raise CommandError(f"{format_size(size)} is too much: each rank can hold {most}", fix, ExitCode.USAGE)


def _say_plan(plan: Any) -> None:
    click.echo(
        f"would make it {plan.capacity_slots:,} slots and evict {counted(plan.evicted_slots, 'block')}, "
        f"{format_size(plan.evicted_bytes)} of each rank"
    )


def _say(view: Any, slots: int, before: int) -> None:
    if getattr(view, "state", "") == "running":
        say_started(view)
    else:
        more = "; ranks pin what is new in the background" if slots > before else ""
        click.echo(f"the pool has {counted(slots, 'slot')}{more}")
