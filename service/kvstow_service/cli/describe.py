"""`kvstow describe`: everything about one thing, a line for each field."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import click

from kvstow.stats import EngineStats, Histogram
from kvstow.status import Readiness
from kvstow_api.numberformat import duration, field_text
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.failures import CommandError, ExitCode
from kvstow_service.cli.output import Format, emit, format_flag, pairs, table
from kvstow_service.cli.poolflag import chosen_pool, find_session, pool_flag

_SECTIONS = tuple(one.name for one in fields(EngineStats))


@click.group()
def describe() -> None:
    """Show one thing in full: the server, a pool, a rank, ..."""


def _noun(name: str) -> Callable[[Callable[..., None]], click.Command]:
    return lambda function: describe.command(name)(format_flag(remote(function)))


@_noun("server")
def server(connection: Connection, style: Format) -> None:
    """The server: version, settings, readiness, ranks, operations."""
    from kvstow_api.client import calls

    _show(
        connection,
        style,
        server=calls.info(),
        readiness=calls.readiness(),
        drain=calls.drain_status(),
        bypass=calls.bypass_status(),
        running_operations=calls.operations(state="running"),
    )


@_noun("stats")
@click.option("--section", help=f"Only this one: {', '.join(_SECTIONS)}.", type=click.Choice(_SECTIONS))
@pool_flag
def stats(connection: Connection, style: Format, section: str | None, pool: str | None) -> None:
    """Counters of a pool since it was made."""
    from kvstow_api.client import calls

    with connection.client() as client:
        found = client.send(calls.stats(pool=pool))
    _emit({"stats": _sections(found, *_SECTIONS) if section is None else _sections(found, section)}, style)


@_noun("pool")
@click.argument("name", required=False)
def pool(connection: Connection, style: Format, name: str | None) -> None:
    """A pool: its slots by state, and counters of its blocks. NAME is needed only where there are several."""
    from kvstow_api.client import calls

    with connection.client() as client:
        name = chosen_pool(client, name)
        found, stats = client.send(calls.pool(name)), client.send(calls.stats(pool=name))
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
    from kvstow_api.client import calls

    with connection.client() as client:
        found = [one for one in client.send(calls.namespaces()).items if one.name == name]
    if not found:
        raise CommandError(f"there is no namespace {name!r}", "`kvstow get namespaces` lists them", ExitCode.NOT_FOUND)
    emit(found if len(found) > 1 else found[0], style, lambda _: "\n\n".join(map(details, found)))


@_noun("rank")
@click.argument("number", type=int)
@click.option("--session", metavar="ID", help="The engine; needed only where several have a rank of this number.")
@pool_flag
def rank(connection: Connection, style: Format, number: int, session: str | None, pool: str | None) -> None:
    """A rank as it last reported."""
    from kvstow_api.client import calls

    _show(connection, style, rank=calls.rank(number, pool=pool, session=session))


@_noun("block")
@click.argument("key")
@pool_flag
def block(connection: Connection, style: Format, key: str, pool: str | None) -> None:
    """A block in a pool."""
    from kvstow_api.client import calls

    with connection.client() as client:
        pool = chosen_pool(client, pool)
    _show(connection, style, block=calls.block(key, pool=pool))


@_noun("operation")
@click.argument("operation_id", metavar="ID")
def operation(connection: Connection, style: Format, operation_id: str) -> None:
    """A long-running operation."""
    from kvstow_api.client import calls

    _show(connection, style, operation=calls.operation(operation_id))


def _show(connection: Connection, style: Format, **sections: Any) -> None:
    """Prints nothing unless every section could be read."""
    with connection.client() as client:
        _emit({title: client.send(call) for title, call in sections.items()}, style)


def _emit(found: Mapping[str, Any], style: Format) -> None:
    (first, *more) = found.values()
    emit(found if more else first, style, lambda _: "\n\n".join(_section(*each) for each in found.items()))


def _sections(stats: EngineStats, *names: str) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in names}


def _section(title: str, view: Any) -> str:
    if isinstance(view, Readiness):
        from kvstow_service.cli.tables import RANKS

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
