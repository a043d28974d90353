"""`kvstow events`: the event stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from kvstow_api.numberformat import moment
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.output import Format, text_of, wide_format_flag
from kvstow_service.cli.poolflag import pool_flag

if TYPE_CHECKING:
    from kvstow_api.answers import EventView
    from kvstow_api.client.eventstream import Subscription

_RETRY_SECONDS = 1.0


@click.command()
@click.option("--type", "types", multiple=True, metavar="TYPE", help="Only this type; repeatable.")
@click.option(
    "--recent", type=click.IntRange(0, 1000), default=10, show_default=True, help="Number of past events to start with."
)
@click.option("--limit", type=click.IntRange(1), help="Stop after this many.")
@wide_format_flag
@pool_flag
@remote
def events(
    connection: Connection, types: tuple[Any, ...], recent: int, limit: int | None, style: Format, pool: str | None
) -> None:
    """Print events as they happen, until Ctrl-C.

    Types: state, session, rank, tier, operation, change, lost. Events of blocks, stored and removed, come only if
    --type names them, and only of one pool: --pool where there are several.
    After a lost connection the stream resumes where it was. json prints one object a line.
    """
    from kvstow_api.client.eventstream import Subscription

    stream = _stream(connection, Subscription(types, recent=recent, pool=pool))
    try:
        for event in islice(stream, limit):
            click.echo(_line(event, style))
    except KeyboardInterrupt:
        click.get_current_context().exit()


def _stream(connection: Connection, subscription: Subscription) -> Iterator[EventView]:
    """Events over as many connections as needed. Raises `ApiError` if the first one fails or the server refuses."""
    from dataclasses import replace

    from kvstow_api.client import ApiError

    seen = False
    with connection.client() as client:
        while True:
            try:
                for event in client.events(subscription):
                    seen = True
                    subscription = replace(subscription, after=event.id or subscription.after, recent=0)
                    yield event
            except ApiError as error:
                if error.problem is not None or not seen:
                    raise
                click.echo(f"{error}; trying again", err=True)
            time.sleep(_RETRY_SECONDS)


def _line(event: EventView, style: Format) -> str:
    return text_of(event, style, lambda _: _words(event, with_id=style == "wide"), one_line=True)


def _words(event: EventView, *, with_id: bool) -> str:
    data = dict(event.data)
    said = data.pop("time", None)
    when = moment(datetime.fromisoformat(said) if said else None)
    words = "  ".join(f"{name}={value}" for name, value in data.items() if value not in (None, ""))
    return f"{when:25}  {event.type:9}  {words}" + (f"  id={event.id}" if with_id else "")
