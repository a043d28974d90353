"""`kvstow wait`: wait for a state of the server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import click

from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.failures import CommandError, ExitCode, hint_for
from kvstow_service.cli.valuetypes import TIME

if TYPE_CHECKING:
    from kvstow_api.answers import ReadinessView
    from kvstow_api.client import ApiError, Client

Condition = Literal["ready", "pinned", "drained"]

_POLL_SECONDS = 0.25
_LINE_SECONDS = 5.0
_PASSING = (429, 502, 503, 504)
"""Statuses that may pass."""


class _Status(NamedTuple):
    """Whether the condition is met, and the state of the server in words. `error`: if it did not answer."""

    met: bool
    words: str
    readiness: ReadinessView | None = None
    error: ApiError | None = None


@click.command()
@click.option(
    "--for",
    "condition",
    type=click.Choice(get_args(Condition)),
    default="ready",
    show_default=True,
    help="ready: /readyz passes and the first slots are usable; pinned: all slots are usable, and all memory of a node "
    "is populated; "
    "drained: the server is draining and nothing is in flight.",
)
@click.option("--timeout", type=TIME, default="5m", show_default=True, help="How long to wait; 0 checks once.")
@remote
def wait(connection: Connection, condition: Condition, timeout: float) -> None:
    """Wait until the server is ready, pinned or drained.

    The server does not have to be running yet. Prints what it is waiting for; on a terminal, also the progress of
    each rank. Exits with code 3 on timeout.
    """
    ends = time.monotonic() + timeout
    with connection.client() as client, _display() as show:
        while not (status := _check(client, condition)).met:
            left = ends - time.monotonic()
            if left <= 0:
                raise CommandError(
                    f"not {condition} after {timeout:g} s: {status.words}", _hint(status), ExitCode.NOT_READY
                )
            show(status)
            time.sleep(min(_POLL_SECONDS, left))
    click.echo(status.words)


def _hint(status: _Status) -> str:
    hint = status.error and hint_for(status.error)
    return f"{hint or '`kvstow doctor` shows problems'}; --timeout waits longer"


@contextmanager
def _display() -> Iterator[Callable[[_Status], None]]:
    """Shows each status on standard error: in place on a terminal, as lines elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines().show
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from kvstow_api.rankrows import rank_rows
    from kvstow_service.cli.board import rank_bars

    console = Console(stderr=True, highlight=False)
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def show(status: _Status) -> None:
            words, (width, height) = Text(f"waiting: {status.words}"), console.size
            ranks = () if status.readiness is None else rank_rows(status.readiness.ranks)
            live.update(Group(words, rank_bars(ranks, width, max(4, height - 4))), refresh=True)

        yield show


class _Lines:
    """Prints the first status at once, and then a line every five seconds at most, to spare logs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._said, self._next = clock, "", clock()

    def show(self, status: _Status) -> None:
        if status.words != self._said and self._clock() >= self._next:
            click.echo(f"waiting: {status.words}", err=True)
            self._said, self._next = status.words, self._clock() + _LINE_SECONDS


def _check(client: Client, condition: Condition) -> _Status:
    """A server that is unreachable or busy is waited for. Raises `ApiError` for a refusal that will not pass."""
    from kvstow_api.client import ApiError

    try:
        return _CHECKS[condition](client)
    except ApiError as error:
        if not _may_pass(error):
            raise
        return _Status(False, str(error), error=error)


def _may_pass(error: ApiError) -> bool:
    return error.status is None or error.status in _PASSING


def _ready(client: Client) -> _Status:
    from kvstow_api.client import calls

    probe, readiness = client.send(calls.probe("readyz")), client.send(calls.readiness())
    if probe.ok:
        # a node is ready before the first engine attaches: there is no slot then
        return _Status(bool(readiness.usable_slots or not readiness.capacity_slots), _state(readiness), readiness)
    failed = [line for line in probe.text.splitlines() if line.startswith("[-]") and "(informational)" not in line]
    words = "; ".join(line.removeprefix("[-]") for line in failed) or "/readyz fails"
    return _Status(False, words, readiness)


def _pinned(client: Client) -> _Status:
    from kvstow_api.client import calls

    readiness, is_node = client.send(calls.readiness()), client.send(calls.info()).node
    memory = readiness.memory
    is_populated = not is_node or memory.populated_bytes >= memory.target_bytes
    if readiness.usable_slots >= readiness.capacity_slots and is_populated:
        return _Status(True, _state(readiness), readiness)
    is_paused = any(pool.pinning_paused for pool in client.send(calls.pools()).items)
    paused = "; pinning is paused: `kvstow pinning resume`" if is_paused else ""
    return _Status(False, _state(readiness) + paused, readiness)


def _drained(client: Client) -> _Status:
    from kvstow_api.client import calls
    from kvstow_api.switches import drain_words

    drain = client.send(calls.drain_status())
    hint = "" if drain.active else "; `kvstow drain` starts that"
    return _Status(drain.drained, drain_words(drain) + hint)


_CHECKS = {"ready": _ready, "pinned": _pinned, "drained": _drained}


def _state(readiness: ReadinessView) -> str:
    """How many slots are usable; also the reason, if the state is not on its way to ready."""
    if not readiness.capacity_slots:
        return f"{readiness.state}: {readiness.reason}"
    words = f"{readiness.state}: {readiness.usable_slots:,} of {readiness.capacity_slots:,} slots are usable"
    return words if readiness.state in ("ready", "pinning", "starting") else f"{words}; {readiness.reason}"
