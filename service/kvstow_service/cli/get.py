"""`kvstow get`: lists, once or watched."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kvstow_api.numberformat import moment
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.output import Format, format_option, styled, table, text_of
from kvstow_service.cli.poolflag import chosen_pool
from kvstow_service.cli.valuetypes import TIME

if TYPE_CHECKING:
    from kvstow_api.client import Client, Route

_PAGE = 1000


class _Noun(NamedTuple):
    """One list: its options are query parameters of the route `list_NAME`, or of `route`. `described`: the noun of
    `kvstow describe` that shows one item."""

    name: str
    singular: str
    help: str
    options: tuple[click.Option, ...] = ()
    described: bool = True
    in_pool: bool = False
    """The list is below a pool: without --pool, below the only one."""
    route: str = ""


_LIMIT = click.Option(["--limit"], type=click.IntRange(1), default=100, show_default=True, help="At most this many.")
_POOL = click.Option(["--pool"], metavar="NAME", help="The pool; needed only where the server has several.")
_OF_POOL = click.Option(["--pool"], metavar="NAME", help="Only those of this pool.")
_OF_NAMESPACE = click.Option(["--namespace"], metavar="NAME", help="Only those of this namespace.")
_OF_SESSION = click.Option(["--session"], metavar="ID", help="Only those of this engine.")
_NOUNS = (
    _Noun("pools", "pool", "Pools: state, memory, use, traffic."),
    _Noun("sessions", "session", "Engines that use the pools: state, processes, work in flight."),
    _Noun("namespaces", "namespace", "Namespaces: model, weights, and which engines share blocks."),
    _Noun("ranks", "rank", "Ranks: process, device, state, pinned memory.", (_OF_POOL, _OF_SESSION)),
    _Noun("blocks", "block", "Blocks in a pool.", (_LIMIT, _POOL, _OF_NAMESPACE), in_pool=True),
    _Noun(
        "transfers",
        "transfer",
        "Loads and stores in flight, oldest first.",
        (
            click.Option(["--direction"], type=click.Choice(["load", "store"])),
            click.Option(["--state"], type=click.Choice(["queued", "running", "stuck", "quarantined"])),
            click.Option(["--slowest"], type=click.IntRange(1), help="Only this many, the oldest."),
            _OF_POOL,
            _OF_SESSION,
        ),
        described=False,
    ),
    _Noun(
        "operations",
        "operation",
        "Long-running operations, newest first.",
        (
            click.Option(["--kind"], type=click.Choice(["evict", "purge", "resize"])),
            click.Option(["--state"], type=click.Choice(["running", "succeeded", "failed", "cancelled"])),
            _OF_POOL,
            _LIMIT,
        ),
    ),
    _Noun(
        "tiers",
        "tier",
        "The fleet tier of each pool: state, rates, queue, what it saves.",
        described=False,
        route="get_tier",
    ),
    _Noun("log-levels", "log-level", "Levels of the server's loggers.", described=False, route="get_log_levels"),
)
_ALIASES = {"op": "operations", "ops": "operations", **{noun.singular: noun.name for noun in _NOUNS}}


class _AliasGroup(click.Group):
    """Accepts its nouns in the singular as well."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, _ALIASES.get(cmd_name, cmd_name))


@click.group(cls=_AliasGroup)
def get() -> None:
    """List pools, sessions, ranks, blocks, transfers, operations, ...

    `kvstow describe` shows one of them in full.
    """


def _command(noun: _Noun) -> click.Command:
    @get.command(noun.name, help=noun.help)
    @click.argument("extra", nargs=-1, metavar="")
    @format_option(("table", "wide", "name", "json", "yaml"), "wide shows more columns, name only ids.")
    @click.option("--watch", "-w", is_flag=True, help="Repeat until Ctrl-C.")
    @click.option("--interval", type=TIME, default="2s", show_default=True, help="How often --watch asks the server.")
    @remote
    def command(
        connection: Connection,
        extra: tuple[str, ...],
        style: Format,
        watch: bool,
        interval: float,
        **options: Any,
    ) -> None:
        if extra and noun.described:
            raise click.UsageError(f"this is a list; `kvstow describe {noun.singular} {extra[0]}` shows one")
        if extra:
            raise click.UsageError(f"unexpected argument {extra[0]}")
        with connection.client() as client:
            fetch = partial(_fetch, client, noun, style, options, watched=watch)
            if watch:
                _watch(fetch, max(interval, 0.1), title=f"kvstow get {noun.name}  {connection.server}")
            else:
                click.echo(fetch(), nl=style != "name")

    command.params[:0] = noun.options
    return command


for _noun in _NOUNS:
    _command(_noun)


def _fetch(client: Client, noun: _Noun, style: Format, options: dict[str, Any], *, watched: bool) -> str:
    from kvstow_service.cli.tables import LISTS

    columns, identifier = LISTS[noun.name]
    view: Any = _read(client, noun, **options)
    note = _note(view, options)
    if note and not watched:
        click.echo(note, err=True)
    if style == "name":
        return "".join(f"{getattr(item, identifier)}\n" for item in view.items)
    text = text_of(view, style, lambda view: table(view.items, columns, wide=style == "wide"), one_line=watched)
    return f"{text}\n{note}" if note and watched and style in ("table", "wide") else text


def _note(view: Any, options: dict[str, Any]) -> str:
    """A note for a list that is cut off, or that is empty for a reason."""
    if getattr(view, "store", "") is None:
        return "there is no fleet tier: `kvstow serve --tier URL` has one"
    is_cut = getattr(view, "next_page_token", None) is not None
    return f"there are more than {options['limit']}; --limit shows them" if is_cut else ""


def _read(client: Client, noun: _Noun, *, limit: int | None = None, **chosen: Any) -> Any:
    """The list; of one that has pages, as many as `limit` items take."""
    from kvstow_api.client import routes

    route: Route[Any] = getattr(routes, noun.route or f"list_{noun.name}")
    if noun.in_pool:
        chosen["pool"] = chosen_pool(client, chosen["pool"])
    if limit is None:
        view: Any = client.call(route, **chosen)
        return view
    pages = list(_pages(partial(client.call, route, **chosen), limit))
    whole: Any = replace(pages[-1], items=[item for page in pages for item in page.items])
    return whole


def _pages(call: Callable[..., Any], limit: int) -> Iterator[Any]:
    token, left = None, limit
    while True:
        page: Any = call(page_size=min(left, _PAGE), page_token=token)
        yield page
        token, left = page.next_page_token, left - len(page.items)
        if token is None or left <= 0:
            return


def _watch(
    fetch: Callable[[], str],
    interval: float,
    *,
    title: str,
    sleep: Callable[[float], object] = time.sleep,
    now: Callable[[], datetime] = datetime.now,
) -> None:
    """Print what `fetch` returns, until Ctrl-C: a terminal shows the newest text, a pipe gets every changed one.

    Once the server has answered, a lost connection is reported and tried again. Raises `ApiError` before that, and if
    the server refuses.
    """
    from kvstow_api.client import ApiError

    on_terminal = sys.stdout.isatty()
    shown: str | None = None
    lost = ""
    try:
        while True:
            before, lost_before = shown, lost
            try:
                shown, lost = fetch(), ""
            except ApiError as error:
                if error.problem is not None or shown is None:
                    raise
                lost = f"no answer: {error}; trying again"
            if on_terminal:
                click.clear()
                click.echo(f"{styled(title, bold=True)}  {moment(now())}")
                click.echo(f"{styled(lost, 'red')}\n{shown}")
            else:
                if lost != lost_before:
                    click.echo(lost, err=True, nl=bool(lost))
                if shown != before:
                    click.echo(shown)
            sleep(interval)
    except KeyboardInterrupt:
        return
