"""Commands on blocks: evict, purge, protect, unprotect. Long operations are followed to their end, or cancelled."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvstow_api.texts import counted
from kvstow_service.cli.connection import (
    SIZE,
    TIME,
    Connection,
    Effect,
    chosen_pool,
    confirm,
    dry_run_flag,
    evicted,
    pool_flag,
    remote,
    yes_flag,
)
from kvstow_service.cli.failures import CommandError, ExitCode
from kvstow_service.cli.output import Format, emit, format_flag, table

if TYPE_CHECKING:
    from kvstow.status import ProtectionResult
    from kvstow_api.answers import OperationView, RemovedView
    from kvstow_api.client import Client, Route

# -- operations -------------------------------------------------------------------------------------------------------


V = TypeVar("V")

no_wait_flag = click.option("--no-wait", is_flag=True, help="Print the operation's id, and do not wait for its end.")


def server_wait(no_wait: bool = False) -> float | None:
    """Seconds for which the server may hold back its answer until the operation has ended; short on a terminal, which
    shows the progress."""
    if no_wait:
        return None
    return 0.25 if sys.stderr.isatty() else 10.0


def follow(
    client: Client,
    route: Route[V | OperationView],
    body: Mapping[str, Any],
    *,
    pool: str,
    if_match: str | None = None,
    no_wait: bool = False,
) -> V | OperationView:
    """Make a request whose answer may be an operation, and wait for that to end unless `no_wait`. `if_match`: an ETag
    of the settings.

    Returns the answer or the operation. Raises `CommandError` if the operation failed or was cancelled.
    """
    from kvstow_api.answers import OperationView

    headers = None if if_match is None else {"If-Match": if_match}
    answer = client.call(route, body, headers=headers, pool=pool, wait=server_wait(no_wait))
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

    from kvstow_api.client import routes

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bars:
        bar = bars.add_task(operation.kind, total=None)
        try:
            while operation.state == "running":
                operation = client.call(routes.get_operation, operation_id=operation.id, wait=server_wait())
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
    from kvstow_api.client import routes
    from kvstow_api.columns import OPERATIONS

    with connection.client() as client:
        view = client.call(routes.cancel_operation, operation_id=operation_id)
    emit(view, style, lambda view: table([view], OPERATIONS))


# -- blocks -----------------------------------------------------------------------------------------------------------


_KEYS_PER_LOOKUP = 256  # a lookup without an admin's credential may have 64 KiB


@click.command()
@click.option("--slots", type=click.IntRange(1), help="This many blocks.")
@click.option("--size", type=SIZE, help="This many bytes of each rank, such as 2GiB.")
@click.option("--idle", type=TIME, help="All blocks that were not used for at least this long.")
@dry_run_flag
@yes_flag
@no_wait_flag
@format_flag
@pool_flag
@remote
def evict(
    connection: Connection,
    slots: int | None,
    size: int | None,
    idle: float | None,
    style: Format,
    pool: str | None,
    **flags: bool,
) -> None:
    """Remove the coldest blocks.

    Leased and protected blocks stay. Give one of --slots, --size and --idle.
    """
    from kvstow_api.client import routes

    if sum(given is not None for given in (slots, size, idle)) != 1:
        raise click.UsageError("give one of --slots, --size and --idle")
    _remove(connection, routes.evict, {"slots": slots, "bytes": size, "idle_seconds": idle}, style, pool, **flags)


@click.command()
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--all", "everything", is_flag=True, help="All blocks.")
@click.option("--key-prefix", "key_prefixes", multiple=True, metavar="HEX", help="Keys with this prefix; repeatable.")
@click.option("--idle", type=TIME, help="All blocks that were not used for at least this long.")
@click.option("--age", type=TIME, help="All blocks that were stored at least this long ago.")
@click.option("--slots", type=click.IntRange(1), help="This many blocks, the coldest.")
@click.option("--size", type=SIZE, help="This many bytes of each rank, the coldest.")
@dry_run_flag
@yes_flag
@no_wait_flag
@format_flag
@pool_flag
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
    style: Format,
    pool: str | None,
    **flags: bool,
) -> None:
    """Remove blocks by key, age or number, protected ones included.

    A KEY is hex text, as `kvstow get blocks` shows it; - reads keys from standard input. Give one kind of selector.
    """
    from kvstow_api.client import routes

    chosen: dict[str, Any] = {
        "all": everything or None,
        "keys": _keys(keys) or None,
        "key_prefixes": list(key_prefixes) or None,
        "idle_seconds": idle,
        "age_seconds": age,
        "slots": slots,
        "bytes": size,
    }
    if sum(value is not None for value in chosen.values()) != 1:
        raise click.UsageError("give one of KEY..., --all, --key-prefix, --idle, --age, --slots and --size")
    _remove(connection, routes.purge, chosen, style, pool, **flags)


@click.command()
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@click.option("--ttl", type=TIME, help="For this long; otherwise until `kvstow unprotect`.")
@dry_run_flag
@format_flag
@pool_flag
@remote
def protect(
    connection: Connection, keys: tuple[str, ...], ttl: float | None, dry_run: bool, style: Format, pool: str | None
) -> None:
    """Protect blocks from eviction.

    A KEY is hex text, as `kvstow get blocks` shows it; - reads keys from standard input. Replaces any earlier
    protection. Exit code 4 if none of the keys is in the pool.
    """
    from kvstow_api.client import routes

    wanted = _keys(keys)
    with connection.client() as client:
        pool = chosen_pool(client, pool)
        plan = _presence(client, wanted, pool)
        if not plan.changed:
            raise CommandError(
                f"none of the {counted(len(wanted), 'key')} is in the pool",
                "`kvstow get blocks` lists the keys",
                ExitCode.NOT_FOUND,
            )
        if dry_run:
            emit(plan, style, partial(_changed, "would protect"))
        else:
            view = client.call(routes.protect, {"keys": wanted, "ttl_seconds": ttl}, pool=pool)
            emit(view, style, partial(_changed, "protected"))


@click.command()
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--all", "everything", is_flag=True, help="All protected blocks.")
@dry_run_flag
@yes_flag
@format_flag
@pool_flag
@remote
def unprotect(
    connection: Connection,
    keys: tuple[str, ...],
    everything: bool,
    dry_run: bool,
    yes: bool,
    style: Format,
    pool: str | None,
) -> None:
    """Let blocks be evicted again.

    A KEY is hex text, as `kvstow get blocks` shows it; - reads keys from standard input.
    """
    from kvstow_api.client import routes

    if bool(keys) == everything:
        raise click.UsageError("give keys, or --all")
    wanted = None if everything else _keys(keys)
    with connection.client() as client:
        pool = chosen_pool(client, pool)
        plan = _protected(client, pool) if wanted is None else _presence(client, wanted, pool) if dry_run else None
        if dry_run and plan is not None:
            emit(plan, style, partial(_changed, "would unprotect" if everything else "would unprotect up to"))
            return
        if plan is not None:  # blocks named by their keys can be protected again
            words = f"unprotect {counted(plan.changed, 'block')}"
            confirm(Effect(words, lost_protections=plan.changed), connection, yes)
        body = {"all": True} if wanted is None else {"keys": wanted}
        emit(client.call(routes.unprotect, body, pool=pool), style, partial(_changed, "unprotected"))


def _remove(
    connection: Connection,
    route: Route[RemovedView | OperationView],
    chosen: dict[str, Any],
    style: Format,
    pool: str | None,
    *,
    dry_run: bool,
    yes: bool,
    no_wait: bool,
) -> None:
    """`chosen` selects the blocks."""
    with connection.client() as client:
        pool = chosen_pool(client, pool)
        effect = Effect("remove blocks", lost_blocks=None)
        if dry_run or not yes:
            planned = follow(client, route, {**chosen, "dry_run": True}, pool=pool)
            if dry_run:
                emit(planned, style, _removed)
                return
            plan = _result(planned)
            effect = Effect(f"remove {evicted(plan)}", lost_blocks=plan.evicted_slots)
        confirm(effect, connection, yes)
        answer = follow(client, route, chosen, pool=pool, no_wait=no_wait)
        emit(answer, style, _removed)


def _result(answer: Any) -> Any:
    """The `RemovedView` of an answer, or of an operation that has ended."""
    return getattr(answer, "result", answer)


def _removed(answer: Any) -> str:
    removed = _result(answer)
    if removed is None:
        return started(answer)
    return f"{'would remove' if removed.dry_run else 'removed'} {evicted(removed)}"


def _keys(arguments: Sequence[str]) -> list[str]:
    """Keys given as arguments; - stands for those on standard input."""
    return [key for argument in arguments for key in (sys.stdin.read().split() if argument == "-" else [argument])]


def _presence(client: Client, keys: Sequence[str], pool: str) -> ProtectionResult:
    """How many of the keys are in the pool."""
    from kvstow.status import ProtectionResult
    from kvstow_api.client import routes

    parts = (keys[start : start + _KEYS_PER_LOOKUP] for start in range(0, len(keys), _KEYS_PER_LOOKUP))
    answers = [client.call(routes.lookup, {"keys": part}, pool=pool) for part in parts]
    present = [is_there for answer in answers for is_there in answer.present]
    return ProtectionResult(changed=present.count(True), missing=present.count(False))


def _protected(client: Client, pool: str) -> ProtectionResult:
    """How many blocks are protected."""
    from kvstow.status import ProtectionResult
    from kvstow_api.client import routes

    return ProtectionResult(changed=client.call(routes.get_pool, pool=pool).slots.protected, missing=0)


def _changed(verb: str, view: ProtectionResult) -> str:
    missing = f"; not in the pool: {counted(view.missing, 'key')}" if view.missing else ""
    return f"{verb} {counted(view.changed, 'block')}{missing}"
