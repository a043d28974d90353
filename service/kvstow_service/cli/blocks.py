"""Commands on blocks: evict, purge, release. They follow long operations to their end, or cancel them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvstow.hints import CONTEXT_BYTES, context_id
from kvstow_api.texts import counted
from kvstow_service.cli.connection import (
    SIZE,
    TIME,
    Invocation,
    chosen_pool,
    dry_run_flag,
    evicted,
    in_store,
    pool_flag,
    remote,
    yes_flag,
)
from kvstow_service.cli.failures import CommandError
from kvstow_service.cli.output import format_flag, table
from kvstow_service.cli.progress import ProgressBars
from kvstow_service.cli.tables import OPERATIONS, progress_words

if TYPE_CHECKING:
    from kvstow_api.answers import OperationView, RemovedView
    from kvstow_api.client import Client, Route

# -- operations -------------------------------------------------------------------------------------------------------


V = TypeVar("V")

no_wait_flag = click.option("--no-wait", is_flag=True, help="Print the operation's id, and do not wait for its end.")


def server_wait(no_wait: bool = False) -> float | None:
    """Return for how many seconds the server may hold back its answer until the operation has ended. On a terminal,
    which shows the progress, they are few."""
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
    """Make a request. If its answer is an operation, wait for its end, unless `no_wait` is set. `if_match` is an ETag
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
    from kvstow_api.client import routes

    with ProgressBars() as bars:
        bar = bars.bar(operation.kind, operation.progress.total)
        try:
            while operation.state == "running":
                operation = client.call(routes.get_operation, operation_id=operation.id, wait=server_wait())
                waiting = ", waiting for transfers" if operation.waiting else ""
                bar(operation.progress.done, f"{progress_words(operation.progress)}{waiting}")
        except KeyboardInterrupt:
            click.echo(f"{operation.id} is still running; `kvstow cancel {operation.id}` stops it", err=True)
            raise
    return operation


def started(operation: Any) -> str:
    """Say how to follow an operation for which the command does not wait."""
    return f"{operation.id} is running; `kvstow describe operation {operation.id}` shows its progress"


@click.command()
@click.argument("operation_id", metavar="ID")
@format_flag
@remote
def cancel(call: Invocation, operation_id: str) -> None:
    """Stop a long-running operation. What it has done so far stays done."""
    from kvstow_api.client import routes

    with call.client() as client:
        view = client.call(routes.cancel_operation, operation_id=operation_id)
    call.emit(view, lambda view: table([view], OPERATIONS))


# -- blocks -----------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--slots", type=click.IntRange(1), help="Number of blocks to remove.")
@click.option("--size", type=SIZE, help="Number of bytes to remove from each rank, such as 2GiB.")
@click.option("--idle", type=TIME, help="Remove all blocks that were not used for this long.")
@click.option(
    "--context", metavar="CONTEXT", help="Remove the blocks that only this context has claimed; its id or its name."
)
@dry_run_flag
@yes_flag
@no_wait_flag
@format_flag
@pool_flag
@remote
def evict(call: Invocation, slots: int | None, size: int | None, idle: float | None, context: str | None) -> None:
    """Remove the coldest blocks.

    Leased blocks stay. Give one of --slots, --size, --idle and --context.
    """
    from kvstow_api.client import routes

    chosen = {
        "slots": slots,
        "bytes": size,
        "idle_seconds": idle,
        "context": None if context is None else context_id_of(context),
    }
    if sum(given is not None for given in chosen.values()) != 1:
        raise click.UsageError("give one of --slots, --size, --idle and --context")
    _remove(call, routes.evict, chosen)


@click.command()
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--all", "everything", is_flag=True, help="Remove all blocks.")
@click.option(
    "--key-prefix", "key_prefixes", multiple=True, metavar="HEX", help="Remove keys with this prefix; repeatable."
)
@click.option("--idle", type=TIME, help="Remove all blocks that were not used for this long.")
@click.option("--age", type=TIME, help="Remove all blocks that were stored this long ago or earlier.")
@click.option("--slots", type=click.IntRange(1), help="Number of the coldest blocks to remove.")
@click.option("--size", type=SIZE, help="Number of bytes to remove from each rank, of the coldest blocks.")
@click.option("--context", metavar="CONTEXT", help="Remove the blocks of this context; its id or its name.")
@dry_run_flag
@yes_flag
@no_wait_flag
@format_flag
@pool_flag
@remote
def purge(
    call: Invocation,
    keys: tuple[str, ...],
    everything: bool,
    key_prefixes: tuple[str, ...],
    idle: float | None,
    age: float | None,
    slots: int | None,
    size: int | None,
    context: str | None,
) -> None:
    """Remove blocks by key, context, age or number.

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
        "context": None if context is None else context_id_of(context),
    }
    if sum(value is not None for value in chosen.values()) != 1:
        raise click.UsageError("give one of KEY..., --all, --key-prefix, --idle, --age, --slots, --size and --context")
    _remove(call, routes.purge, chosen)


# -- contexts ---------------------------------------------------------------------------------------------------------


def context_id_of(text: str, salt: str = "") -> str:
    """Return the id of a context, which is given by its id or by the name that its clients use."""
    if re.fullmatch(f"[0-9a-fA-F]{{{2 * CONTEXT_BYTES}}}", text):
        return text.lower()
    return context_id(text, salt).hex()


@click.command()
@click.argument("context")
@click.option("--salt", default="", metavar="TEXT", help="The cache salt of its requests, if CONTEXT is a name.")
@format_flag
@pool_flag
@remote
def release(call: Invocation, context: str, salt: str) -> None:
    """Say that no further request of a context will come.

    CONTEXT is an id, as `kvstow get contexts` shows it, or the name that clients use. The pool then ranks the blocks
    that no other request has used since like all blocks that clients have released. Policy lru ignores that.
    """
    from kvstow_api.client import routes

    with call.client() as client:
        pool = chosen_pool(client, call.pool)
        view = client.call(routes.release_context, context=context_id_of(context, salt), pool=pool)
    call.emit(view, lambda view: f"released {counted(view.blocks, 'block')}")


# -- removals ---------------------------------------------------------------------------------------------------------


def _remove(call: Invocation, route: Route[RemovedView | OperationView], chosen: dict[str, Any]) -> None:
    """Remove blocks. `chosen` are the parameters that select them."""
    with call.client() as client:
        pool = chosen_pool(client, call.pool)
        effect, is_destructive = "remove blocks", True
        if call.dry_run or not call.yes:
            planned = follow(client, route, {**chosen, "dry_run": True}, pool=pool)
            if call.dry_run:
                call.emit(planned, _removed)
                return
            plan = _result(planned)
            effect = f"remove {evicted(plan)}{in_store(plan)}"
            is_destructive = plan.evicted_slots > 0 or plan.stored_blocks > 0
        call.confirm(effect, destructive=is_destructive)
        call.emit(follow(client, route, chosen, pool=pool, no_wait=call.no_wait), _removed)


def _result(answer: Any) -> Any:
    """Return the `RemovedView`, which is the answer itself or the result of an operation that has ended."""
    return getattr(answer, "result", answer)


def _removed(answer: Any) -> str:
    removed = _result(answer)
    if removed is None:
        return started(answer)
    return f"{'would remove' if removed.dry_run else 'removed'} {evicted(removed)}{in_store(removed)}"


def _keys(arguments: Sequence[str]) -> list[str]:
    """Return the keys. An argument - stands for keys on standard input."""
    return [key for argument in arguments for key in (sys.stdin.read().split() if argument == "-" else [argument])]
