"""`kvstow get` shows lists, once or watched. `kvstow describe` shows everything about one thing, a line for each
field."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import click

from kvstow.stats import DIRECTIONS, EngineStats, Histogram
from kvstow.status import Readiness, TransferState
from kvstow_api.answers import OperationKind, OperationState, PoolCurveView
from kvstow_api.texts import duration, field_text, moment
from kvstow_service.cli.blocks import context_id_of
from kvstow_service.cli.connection import TIME, Invocation, chosen_pool, find_session, pool_flag, remote
from kvstow_service.cli.failures import CommandError, ExitCode
from kvstow_service.cli.output import Format, format_flag, format_option, pairs, styled, table, text_of

if TYPE_CHECKING:
    from kvstow_api.client import Client, Route
    from kvstow_service.cli.tables import Columns

_PAGE = 1000


class _Noun(NamedTuple):
    """One list. Its options are query parameters of `route`, whose default is `list_NAME`."""

    name: str
    help: str
    options: tuple[click.Option, ...] = ()
    route: str = ""

    @property
    def singular(self) -> str:
        return self.name.removesuffix("s")


_LIMIT = click.Option(["--limit"], type=click.IntRange(1), default=100, show_default=True, help="Most items to list.")
_POOL = click.Option(["--pool"], metavar="NAME", help="The pool; needed only where the server has several.")
_OF_POOL = click.Option(["--pool"], metavar="NAME", help="Only items of this pool.")
_OF_NAMESPACE = click.Option(["--namespace"], metavar="NAME", help="Only items of this namespace.")
_OF_SESSION = click.Option(["--session"], metavar="ID", help="Only items of this engine.")
_NOUNS = (
    _Noun("pools", "Pools: state, memory, use, traffic."),
    _Noun("sessions", "Engines that use the pools: state, processes, work in flight."),
    _Noun("namespaces", "Namespaces: model, weights, and which engines share blocks."),
    _Noun("ranks", "Ranks: process, device, state, pinned memory.", (_OF_POOL, _OF_SESSION)),
    _Noun("blocks", "Blocks in a pool.", (_LIMIT, _POOL, _OF_NAMESPACE)),
    _Noun("contexts", "Contexts that clients have named in hints. The largest ones come first.", (_LIMIT, _POOL)),
    _Noun(
        "transfers",
        "Loads and stores in flight, oldest first.",
        (
            click.Option(["--direction"], type=click.Choice(DIRECTIONS)),
            click.Option(["--state"], type=click.Choice(get_args(TransferState))),
            click.Option(["--slowest"], type=click.IntRange(1), help="Number of transfers to list, the oldest first."),
            _OF_POOL,
            _OF_SESSION,
        ),
    ),
    _Noun(
        "operations",
        "Long-running operations, newest first.",
        (
            click.Option(["--kind"], type=click.Choice(get_args(OperationKind))),
            click.Option(["--state"], type=click.Choice(get_args(OperationState))),
            _OF_POOL,
            _LIMIT,
        ),
    ),
    _Noun("tiers", "The store below each pool: state, what moves, what it saves.", route="get_tier"),
    _Noun(
        "curve",
        "The hits that other sizes of a pool would have had lately, and advice on the size.",
        (_POOL,),
        route="get_pool_curve",
    ),
    _Noun("log-levels", "Levels of the server's loggers.", route="get_log_levels"),
)
_ALIASES = {"op": "operations", "ops": "operations", **{noun.singular: noun.name for noun in _NOUNS}}


class _AliasGroup(click.Group):
    """Accepts the singular of each noun, too."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, _ALIASES.get(cmd_name, cmd_name))


@click.group(cls=_AliasGroup)
def get() -> None:
    """List pools, sessions, ranks, blocks, contexts, transfers, operations, ...

    `kvstow describe` shows one of them in full.
    """


def _command(noun: _Noun) -> None:
    @get.command(noun.name, help=noun.help)
    @click.argument("extra", nargs=-1, metavar="")
    @format_option(("table", "wide", "name", "json", "yaml"), "wide shows more columns, name only ids.")
    @click.option("--watch", "-w", is_flag=True, help="Repeat until Ctrl-C.")
    @click.option("--interval", type=TIME, default="2s", show_default=True, help="How often --watch asks the server.")
    @remote
    def command(call: Invocation, extra: tuple[str, ...], watch: bool, interval: float, **options: Any) -> None:
        if extra and noun.singular in describe.commands:
            raise click.UsageError(f"this is a list; `kvstow describe {noun.singular} {extra[0]}` shows one")
        if extra:
            raise click.UsageError(f"unexpected argument {extra[0]}")
        if any(option.name == "pool" for option in noun.options):
            options["pool"] = call.pool
        with call.client() as client:
            fetch = partial(_fetch, client, noun, call.style, options, watched=watch)
            if watch:
                _watch(fetch, max(interval, 0.1), title=f"kvstow get {noun.name}  {call.connection.server}")
            else:
                click.echo(fetch(), nl=call.style != "name")

    command.params[:0] = noun.options


for _one in _NOUNS:
    _command(_one)


def _fetch(client: Client, noun: _Noun, style: Format, options: dict[str, Any], *, watched: bool) -> str:
    from kvstow_service.cli.tables import LISTS

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


def _shown(view: Any, kind: Columns[Any], *, wide: bool) -> str:
    """Return the table. For a curve, add what follows from it, or why there is none."""
    if not isinstance(view, PoolCurveView):
        return table(view.items, kind, wide=wide)
    words = "\n".join(filter(None, (view.advice, view.disk_advice)))
    return f"{table(view.items, kind, wide=wide)}\n\n{words}" if view.items else words


def _note(view: Any, options: dict[str, Any]) -> str:
    """Return a note for a list that is incomplete, or that is empty for a known reason."""
    if getattr(view, "store", "") is None:
        return "there is no store below the pools: `kvstow serve --tier URL` has one"
    is_cut = getattr(view, "next_page_token", None) is not None
    return f"there are more than {options['limit']}; --limit shows them" if is_cut else ""


def _read(client: Client, noun: _Noun, *, limit: int | None = None, **chosen: Any) -> Any:
    """Read the list. If it comes in pages, read as many as `limit` items need."""
    from kvstow_api.client import routes

    route: Route[Any] = getattr(routes, noun.route or f"list_{noun.name}")
    if _POOL in noun.options:
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
    """Print what `fetch` returns, until Ctrl-C. A terminal shows the newest text, and a pipe gets every changed one.

    Once the server has answered, a lost connection is reported, and the read is tried again. Raises `ApiError` if the
    first read fails, or if the server refuses one.
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


def _described(
    help: str, *params: Callable[[Any], Any], in_pool: bool = False
) -> Callable[[Callable[..., Mapping[str, Any]]], click.Command]:
    """Make a command that shows what the function returns, by title. With `in_pool`, the function gets the pool, which
    need not be named if there is only one. The command prints nothing unless everything could be read."""

    def register(function: Callable[..., Mapping[str, Any]]) -> click.Command:
        def command(call: Invocation, **options: Any) -> None:
            with call.client() as client:
                if pool_flag in params or in_pool:
                    options["pool"] = chosen_pool(client, call.pool) if in_pool else call.pool
                found = function(client, **options)
            (first, *more) = found.values()
            call.emit(found if more else first, lambda _: "\n\n".join(_section(*each) for each in found.items()))

        decorated: Callable[..., None] = remote(command)
        for param in reversed((*params, *([pool_flag] if in_pool else []), format_flag)):
            decorated = param(decorated)
        return describe.command(function.__name__, help=help)(decorated)

    return register


@_described("The server: version, settings, readiness, ranks, operations.")
def server(client: Client) -> Mapping[str, Any]:
    from kvstow_api.client import routes

    return {
        "server": client.call(routes.get_info),
        "readiness": client.call(routes.get_readiness),
        "drain": client.call(routes.get_drain),
        "bypass": client.call(routes.get_bypass),
        "running_operations": client.call(routes.list_operations, state="running"),
    }


@_described(
    "Counters of a pool since it was made.",
    click.option("--section", help=f"Only this one: {', '.join(_SECTIONS)}.", type=click.Choice(_SECTIONS)),
    pool_flag,
)
def stats(client: Client, section: str | None, pool: str | None) -> Mapping[str, Any]:
    from kvstow_api.client import routes

    return {"stats": _sections(client.call(routes.get_stats, pool=pool), *([section] if section else _SECTIONS))}


@_described(
    "A pool: its slots by state, and counters of its blocks. NAME is needed only where there are several.",
    click.argument("name", required=False),
)
def pool(client: Client, name: str | None) -> Mapping[str, Any]:
    from kvstow_api.client import routes

    name = chosen_pool(client, name)
    blocks = _sections(client.call(routes.get_stats, pool=name), "stores", "evictions", "lookups")
    return {"pool": client.call(routes.get_pool, pool=name), "blocks": blocks}


@_described("An engine that uses a pool, and its ranks.", click.argument("session_id", metavar="ID"))
def session(client: Client, session_id: str) -> Mapping[str, Any]:
    return {"session": find_session(client, session_id)}


@_described("A namespace of a pool: model, weights, and which engines share its blocks.", click.argument("name"))
def namespace(client: Client, name: str) -> Mapping[str, Any]:
    from kvstow_api.client import routes

    found = [one for one in client.call(routes.list_namespaces).items if one.name == name]
    if not found:
        raise CommandError(f"there is no namespace {name!r}", "`kvstow get namespaces` lists them", ExitCode.NOT_FOUND)
    return {"namespace": found if len(found) > 1 else found[0]}


@_described(
    "A rank as it last reported.",
    click.argument("number", type=int),
    click.option("--session", metavar="ID", help="The engine; needed only where several have a rank of this number."),
    pool_flag,
)
def rank(client: Client, number: int, session: str | None, pool: str | None) -> Mapping[str, Any]:
    from kvstow_api.client import routes

    return {"rank": client.call(routes.get_rank, rank=number, pool=pool, session=session)}


@_described("A block in a pool.", click.argument("key"), in_pool=True)
def block(client: Client, key: str, pool: str) -> Mapping[str, Any]:
    from kvstow_api.client import routes

    return {"block": client.call(routes.get_block, pool=pool, key=key)}


@_described(
    "A context that hints have named, by its id or its name.",
    click.argument("context", metavar="CONTEXT"),
    in_pool=True,
)
def context(client: Client, context: str, pool: str) -> Mapping[str, Any]:
    from kvstow_api.client import routes

    return {"context": client.call(routes.get_context, context=context_id_of(context), pool=pool)}


@_described("A long-running operation.", click.argument("operation_id", metavar="ID"))
def operation(client: Client, operation_id: str) -> Mapping[str, Any]:
    from kvstow_api.client import routes

    return {"operation": client.call(routes.get_operation, operation_id=operation_id)}


def _sections(stats: EngineStats, *names: str) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in names}


def _section(title: str, view: Any) -> str:
    if isinstance(view, Readiness):
        from kvstow_service.cli.tables import RANKS

        summary = {name: value for name, value in _fields(view) if name != "ranks"}
        return f"{pairs(_entry(title, summary))}\n\n{table(view.ranks, RANKS)}"
    return pairs(_entry(title, view if isinstance(view, Mapping) else getattr(view, "items", view)))


def details(view: Any) -> str:
    """Show all fields of a view, and the fields within them."""
    return pairs(_details(view))


_UNIT = re.compile(r"_(bytes_per_second|seconds|bytes)(?=_left$|$)")  # left out of names, because values show the unit


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
