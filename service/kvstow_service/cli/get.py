"""`kvstow get`: lists, once or watched; `kvstow describe`: everything about one thing, a line for each field."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kvstow.stats import EngineStats, Histogram
from kvstow.status import SOURCE_KINDS, Readiness
from kvstow_api.answers import PoolCurveView
from kvstow_api.texts import duration, field_text, moment
from kvstow_service.cli.blocks import context_id_of
from kvstow_service.cli.connection import TIME, Connection, chosen_pool, find_session, pool_flag, remote
from kvstow_service.cli.failures import CommandError, ExitCode
from kvstow_service.cli.output import Format, emit, format_flag, format_option, pairs, styled, table, text_of

if TYPE_CHECKING:
    from kvstow_api.client import Client, Route
    from kvstow_api.columns import Columns

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
        "contexts",
        "context",
        "Contexts that hints have named, those with the most blocks first.",
        (_LIMIT, _POOL),
        in_pool=True,
    ),
    _Noun(
        "sources",
        "source",
        "Who uses a pool most: models, adapters, salts and sessions, all but the models as digests.",
        (
            click.Option(["--kind"], type=click.Choice(SOURCE_KINDS)),
            click.Option(
                ["--by"],
                type=click.Choice(["hits", "stores", "slots"]),
                default="hits",
                show_default=True,
                help="Those that have most of these.",
            ),
            _POOL,
        ),
        described=False,
        in_pool=True,
    ),
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
    _Noun(
        "curve",
        "curve",
        "What a pool of other sizes would have hit lately, and what follows for its size.",
        (_POOL,),
        described=False,
        in_pool=True,
        route="get_pool_curve",
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
    """List pools, sessions, ranks, blocks, contexts, transfers, operations, ...

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


for _one in _NOUNS:
    _command(_one)


def _fetch(client: Client, noun: _Noun, style: Format, options: dict[str, Any], *, watched: bool) -> str:
    from kvstow_api.columns import LISTS

    kind = LISTS[noun.name]
    view: Any = _read(client, noun, **options)
    note = _note(view, options)
    if note and not watched:
        click.echo(note, err=True)
    if style == "name":
        names = [getattr(item, kind.name) for item in view.items]
        return "".join(f"{name}\n" for name in names if name is not None)
    text = text_of(view, style, lambda view: _shown(view, kind, wide=style == "wide"), one_line=watched)
    return f"{text}\n{note}" if note and watched and style in ("table", "wide") else text


def _shown(view: Any, kind: Columns, *, wide: bool) -> str:
    """The table; of a curve, also what follows from it, or why there is none."""
    if not isinstance(view, PoolCurveView):
        return table(view.items, kind, wide=wide)
    return f"{table(view.items, kind, wide=wide)}\n\n{view.advice}" if view.items else view.advice


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


# -- describe ---------------------------------------------------------------------------------------------------------


_SECTIONS = tuple(one.name for one in fields(EngineStats))


@click.group()
def describe() -> None:
    """Show one thing in full: the server, a pool, a rank, ..."""


def _noun(name: str) -> Callable[[Callable[..., None]], click.Command]:
    return lambda function: describe.command(name)(format_flag(remote(function)))


@_noun("server")
def server(connection: Connection, style: Format) -> None:
    """The server: version, settings, readiness, ranks, operations."""
    from kvstow_api.client import routes

    _show(
        connection,
        style,
        server=_asking(routes.get_info),
        readiness=_asking(routes.get_readiness),
        drain=_asking(routes.get_drain),
        bypass=_asking(routes.get_bypass),
        running_operations=_asking(routes.list_operations, state="running"),
    )


@_noun("stats")
@click.option("--section", help=f"Only this one: {', '.join(_SECTIONS)}.", type=click.Choice(_SECTIONS))
@pool_flag
def stats(connection: Connection, style: Format, section: str | None, pool: str | None) -> None:
    """Counters of a pool since it was made."""
    from kvstow_api.client import routes

    with connection.client() as client:
        found = client.call(routes.get_stats, pool=pool)
    _emit({"stats": _sections(found, *_SECTIONS) if section is None else _sections(found, section)}, style)


@_noun("pool")
@click.argument("name", required=False)
def pool(connection: Connection, style: Format, name: str | None) -> None:
    """A pool: its slots by state, and counters of its blocks. NAME is needed only where there are several."""
    from kvstow_api.client import routes

    with connection.client() as client:
        name = chosen_pool(client, name)
        found, stats = client.call(routes.get_pool, pool=name), client.call(routes.get_stats, pool=name)
    _emit({"pool": found, "blocks": _sections(stats, "stores", "evictions", "lookups")}, style)


@_noun("session")
@click.argument("session_id", metavar="ID")
def session(connection: Connection, style: Format, session_id: str) -> None:
    """An engine that uses a pool, and its ranks."""

    with connection.client() as client:
        found = find_session(client, session_id)
    emit(found, style, details)


@_noun("namespace")
@click.argument("name")
def namespace(connection: Connection, style: Format, name: str) -> None:
    """A namespace of a pool: model, weights, and which engines share its blocks."""
    from kvstow_api.client import routes

    with connection.client() as client:
        found = [one for one in client.call(routes.list_namespaces).items if one.name == name]
    if not found:
        raise CommandError(f"there is no namespace {name!r}", "`kvstow get namespaces` lists them", ExitCode.NOT_FOUND)
    emit(found if len(found) > 1 else found[0], style, lambda _: "\n\n".join(map(details, found)))


@_noun("rank")
@click.argument("number", type=int)
@click.option("--session", metavar="ID", help="The engine; needed only where several have a rank of this number.")
@pool_flag
def rank(connection: Connection, style: Format, number: int, session: str | None, pool: str | None) -> None:
    """A rank as it last reported."""
    from kvstow_api.client import routes

    _show(connection, style, rank=_asking(routes.get_rank, rank=number, pool=pool, session=session))


@_noun("block")
@click.argument("key")
@pool_flag
def block(connection: Connection, style: Format, key: str, pool: str | None) -> None:
    """A block in a pool."""
    from kvstow_api.client import routes

    with connection.client() as client:
        pool = chosen_pool(client, pool)
    _show(connection, style, block=_asking(routes.get_block, pool=pool, key=key))


@_noun("context")
@click.argument("context", metavar="CONTEXT")
@pool_flag
def context(connection: Connection, style: Format, context: str, pool: str | None) -> None:
    """A context that hints have named, by its id or its name."""
    from kvstow_api.client import routes

    with connection.client() as client:
        pool = chosen_pool(client, pool)
        found = client.call(routes.get_context, context=context_id_of(context), pool=pool)
    emit(found, style, lambda view: "\n\n".join(map(details, view.items)))


@_noun("operation")
@click.argument("operation_id", metavar="ID")
def operation(connection: Connection, style: Format, operation_id: str) -> None:
    """A long-running operation."""
    from kvstow_api.client import routes

    _show(connection, style, operation=_asking(routes.get_operation, operation_id=operation_id))


def _asking(route: Route[Any], **given: Any) -> Callable[[Client], Any]:
    return lambda client: client.call(route, **given)


def _show(connection: Connection, style: Format, **sections: Callable[[Client], Any]) -> None:
    """Prints nothing unless every section could be read."""
    with connection.client() as client:
        _emit({title: ask(client) for title, ask in sections.items()}, style)


def _emit(found: Mapping[str, Any], style: Format) -> None:
    (first, *more) = found.values()
    emit(found if more else first, style, lambda _: "\n\n".join(_section(*each) for each in found.items()))


def _sections(stats: EngineStats, *names: str) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in names}


def _section(title: str, view: Any) -> str:
    if isinstance(view, Readiness):
        from kvstow_api.columns import RANKS

        summary = {name: value for name, value in _fields(view) if name != "ranks"}
        return f"{pairs(_entry(title, summary))}\n\n{table(view.ranks, RANKS)}"
    return pairs(_entry(title, view if isinstance(view, Mapping) else getattr(view, "items", view)))


def details(view: Any) -> str:
    """All fields of a view, and those within them."""
    return pairs(_details(view))


_UNIT = re.compile(r"_(bytes_per_second|seconds|bytes)(?=_left$|$)")  # the value shows it


def _details(view: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    for name, value in _fields(view):
        yield from _entry(name, value, depth)


def _entry(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    label = "  " * depth + _UNIT.sub("", name).replace("_", " ")
    match value:
        case Histogram():
            yield label, _summary(name, value)
        case Mapping() if value:
            yield label, ""
            for key, item in value.items():
                yield from _entry(f"{key}_bytes" if name.endswith("_bytes") else key, item, depth + 1)
        case [first, *_] if is_dataclass(first):
            for number, item in enumerate(value):
                yield f"{label} {number}", ""
                yield from _details(item, depth + 1)
        case _ if is_dataclass(value):
            yield label, ""
            yield from _details(value, depth + 1)
        case _:
            yield label, "-" if value == {} else field_text(name, value)


def _fields(view: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(view, Mapping):
        yield from view.items()
        return
    for one in fields(view):
        yield one.name, getattr(view, one.name)


def _summary(name: str, histogram: Histogram) -> str:
    if not histogram.count:
        return "none"
    mean = histogram.sum / histogram.count
    return f"{histogram.count:,}, mean {field_text(name, mean) if 'bytes' in name else duration(mean)}"
