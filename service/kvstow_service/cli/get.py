"""`kvstow get`: what there is, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.output import Column, Format, emit, format_flag, print_pairs, print_table

if TYPE_CHECKING:
    from kvstow_api.client import Call, Client

_ALIASES = {
    "pool": "pools",
    "block": "blocks",
    "rank": "ranks",
    "transfer": "transfers",
    "operation": "operations",
    "op": "operations",
    "ops": "operations",
    "log-level": "log-levels",
}
_PAGE = 1000


class _AliasGroup(click.Group):
    """Knows its nouns in the singular, too."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, _ALIASES.get(cmd_name, cmd_name))


@click.group(cls=_AliasGroup)
def get() -> None:
    """Show what there is: pools, ranks, blocks, transfers, ..."""


def _noun(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """Adds `kvstow get NAME`, with the flags that all of these have."""
    return lambda function: get.command(name)(format_flag(remote(function)))


_name = click.argument("name", required=False)
_limit = click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="So many at most.")


@_noun("info")
def info(connection: Connection, style: Format) -> None:
    """What the server is: version, mode, settings."""
    _details(connection, style, lambda calls: calls.info())


@_noun("readiness")
def readiness(connection: Connection, style: Format) -> None:
    """Whether traffic can flow, and if not, why."""
    from kvstow_service.cli.tables import READINESS

    _one(connection, style, lambda calls: calls.readiness(), READINESS)


@_noun("stats")
@click.option("--section", multiple=True, help="Only this one: pool, transfers, lookups, stores, evictions or faults.")
def stats(connection: Connection, style: Format, section: tuple[Any, ...]) -> None:
    """Counters since the engine was made."""
    _details(connection, style, lambda calls: calls.stats(*section))


@_noun("pools")
@_name
def pools(connection: Connection, style: Format, name: str | None) -> None:
    """Pools, or the one named NAME."""
    from kvstow_service.cli.tables import POOLS

    if name:
        _one(connection, style, lambda calls: calls.pool(name), POOLS)
    else:
        _items(connection, style, lambda calls: calls.pools(), POOLS)


@_noun("ranks")
@click.argument("number", type=int, required=False)
def ranks(connection: Connection, style: Format, number: int | None) -> None:
    """Ranks and what they have pinned, or one NUMBER."""
    from kvstow_service.cli.tables import RANKS

    if number is not None:
        _one(connection, style, lambda calls: calls.rank(number), RANKS)
    else:
        _items(connection, style, lambda calls: calls.ranks(), RANKS)


@_noun("blocks")
@click.argument("key", required=False)
@_limit
def blocks(connection: Connection, style: Format, key: str | None, limit: int) -> None:
    """Blocks in the pool, or the one with this KEY."""
    from kvstow_service.cli.tables import BLOCKS

    if key:
        _one(connection, style, lambda calls: calls.block(key), BLOCKS)
    else:
        _pages(connection, style, "blocks", {}, limit, BLOCKS)


@_noun("transfers")
@click.option("--direction", type=click.Choice(["load", "store"]))
@click.option("--state", type=click.Choice(["queued", "running", "stuck", "quarantined"]))
@click.option("--slowest", type=click.IntRange(1), help="Only so many, the oldest.")
def transfers(connection: Connection, style: Format, **chosen: Any) -> None:
    """Loads and stores in flight, the oldest first."""
    from kvstow_service.cli.tables import TRANSFERS

    _items(connection, style, lambda calls: calls.transfers(**chosen), TRANSFERS)


@_noun("operations")
@click.argument("operation_id", metavar="[ID]", required=False)
@click.option("--kind", type=click.Choice(["evict", "purge", "resize"]))
@click.option("--state", type=click.Choice(["running", "succeeded", "failed", "cancelled"]))
@_limit
def operations(connection: Connection, style: Format, operation_id: str | None, limit: int, **chosen: Any) -> None:
    """Long-running operations, or the one with this ID."""
    from kvstow_service.cli.tables import OPERATIONS

    if operation_id:
        _one(connection, style, lambda calls: calls.operation(operation_id), OPERATIONS)
    else:
        _pages(connection, style, "operations", chosen, limit, OPERATIONS)


@_noun("drain")
def drain(connection: Connection, style: Format) -> None:
    """Whether a drain is on, and what is still in flight."""
    from kvstow_service.cli.tables import DRAIN

    _one(connection, style, lambda calls: calls.drain_status(), DRAIN)


@_noun("bypass")
def bypass(connection: Connection, style: Format) -> None:
    """Whether loads or stores are switched off."""
    from kvstow_service.cli.tables import BYPASS

    _one(connection, style, lambda calls: calls.bypass_status(), BYPASS)


@_noun("log-levels")
def log_levels(connection: Connection, style: Format) -> None:
    """Levels of the server's loggers."""
    from kvstow_service.cli.tables import LOG_LEVELS

    _items(connection, style, lambda calls: calls.log_levels(), LOG_LEVELS)


def _ask(connection: Connection, make: Callable[[Any], Call[Any]]) -> Any:
    from kvstow_api.client import calls

    with connection.client() as client:
        return client.send(make(calls))


def _details(connection: Connection, style: Format, make: Callable[[Any], Call[Any]]) -> None:
    from kvstow_service.cli.details import details_of

    emit(_ask(connection, make), style, lambda view: print_pairs(details_of(view)))


def _one(connection: Connection, style: Format, make: Callable[[Any], Call[Any]], columns: tuple[Column, ...]) -> None:
    emit(_ask(connection, make), style, lambda view: print_table([view], columns, wide=style == "wide"))


def _items(
    connection: Connection, style: Format, make: Callable[[Any], Call[Any]], columns: tuple[Column, ...]
) -> None:
    _emit_items(_ask(connection, make), style, columns)


def _emit_items(view: Any, style: Format, columns: tuple[Column, ...]) -> None:
    emit(view, style, lambda view: print_table(view.items, columns, wide=style == "wide"))  # type: ignore[attr-defined]


def _pages(
    connection: Connection,
    style: Format,
    noun: str,
    chosen: dict[str, Any],
    limit: int,
    columns: tuple[Column, ...],
) -> None:
    """As many pages as it takes; says so when there would be more."""
    from dataclasses import replace

    with connection.client() as client:
        pages = list(_read_pages(client, noun, chosen, limit))
    items = [item for page in pages for item in page.items]
    _emit_items(replace(pages[-1], items=items), style, columns)
    if pages[-1].next_page_token is not None:
        click.echo(f"there are more than these {limit}: see them with --limit", err=True)


def _read_pages(client: Client, noun: str, chosen: dict[str, Any], limit: int) -> Iterator[Any]:
    from kvstow_api.client import calls

    token, left = None, limit
    while True:
        page: Any = client.send(getattr(calls, noun)(**chosen, page_size=min(left, _PAGE), page_token=token))
        yield page
        token, left = page.next_page_token, left - len(page.items)
        if token is None or left <= 0:
            return
