"""`kvstow doctor`, `kvstow events` and `kvstow wait`: what is wrong, what happens, and when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import click

from kvstow_api.texts import counted, moment
from kvstow_service.cli.connection import TIME, Invocation, pool_flag, remote
from kvstow_service.cli.failures import CommandError, ExitCode, hint_for
from kvstow_service.cli.output import STATE_STYLES, styled, text_of, wide_format_flag

if TYPE_CHECKING:
    from kvstow_api.answers import DoctorView, EventView, ReadinessView
    from kvstow_api.client import ApiError, Client

# -- doctor -----------------------------------------------------------------------------------------------------------


@click.command()
@wide_format_flag
@remote
def doctor(call: Invocation) -> None:
    """Show what is wrong, what it affects, and how to fix it.

    Exit code 1 if there is a warning or an error. wide shows the numbers, and what could not be measured.
    """
    from kvstow_api.client import routes

    with call.client() as client:
        view = client.call(routes.get_doctor)
    call.emit(view, lambda view: "\n".join(_lines(view, wide=call.style == "wide")))
    click.get_current_context().exit(ExitCode.OK if view.healthy else ExitCode.ERROR)


def _lines(view: DoctorView, *, wide: bool) -> Iterator[str]:
    for one in view.conditions:
        yield f"{styled(one.severity, STATE_STYLES.get(one.severity))}  {one.what}"
        yield f"  why  {one.why}"
        yield f"  fix  {one.fix}"
        if wide:
            numbers = ", ".join(f"{name} {value:,g}" for name, value in one.evidence.items())
            yield f"  {one.name}: {numbers or 'no numbers'}"
        yield ""
    yield f"{counted(len(view.conditions), 'condition')}; {counted(len(view.checked), 'kind')} looked for"
    if wide:
        yield from (f"not looked for: {name}: {reason}" for name, reason in view.skipped.items())


# -- events -----------------------------------------------------------------------------------------------------------


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
def events(call: Invocation, types: tuple[Any, ...], recent: int, limit: int | None) -> None:
    """Print events as they happen, until Ctrl-C.

    Types: state, session, rank, tier, operation, change, lost. Events of blocks, stored and removed,
    come only if --type names them, and only of one pool: --pool where there are several.
    After a lost connection the stream resumes where it was. json prints one object a line.
    """
    stream = _stream(call, types, recent)
    try:
        for event in islice(stream, limit):
            click.echo(text_of(event, call.style, _words if call.style == "table" else _words_with_id, one_line=True))
    except KeyboardInterrupt:
        click.get_current_context().exit()


def _stream(call: Invocation, types: tuple[Any, ...], recent: int) -> Iterator[EventView]:
    """Events over as many connections as needed. Raises `ApiError` if the first one fails or the server refuses."""
    from kvstow_api.client import ApiError

    seen, after = False, None
    with call.client() as client:
        while True:
            try:
                for event in client.events(types, after=after, recent=recent, pool=call.pool):
                    seen, after, recent = True, event.id or after, 0
                    yield event
            except ApiError as error:
                if error.problem is not None or not seen:
                    raise
                click.echo(f"{error}; trying again", err=True)
            time.sleep(_RETRY_SECONDS)


def _words(event: EventView) -> str:
    data = dict(event.data)
    said = data.pop("time", None)
    when = moment(datetime.fromisoformat(said) if said else None)
    words = "  ".join(f"{name}={value}" for name, value in data.items() if value not in (None, ""))
    return f"{when:25}  {event.type:9}  {words}"


def _words_with_id(event: EventView) -> str:
    return f"{_words(event)}  id={event.id}"


# -- wait -------------------------------------------------------------------------------------------------------------


Condition = Literal["ready", "pinned", "drained"]

_POLL_SECONDS = 0.25
_LINE_SECONDS = 5.0
_PASSING = (429, 502, 503, 504)
"""Statuses that may pass."""


class _Status(NamedTuple):
    """Whether the condition is met, and the state of the server in words. `error`: if it did not answer."""

    met: bool
    words: str
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
def wait(call: Invocation, condition: Condition, timeout: float) -> None:
    """Wait until the server is ready, pinned or drained.

    The server does not have to be running yet. Prints what it is waiting for. Exits with code 3 on timeout.
    """
    ends = time.monotonic() + timeout
    lines = _Lines()
    with call.client() as client:
        while not (status := _check(client, condition)).met:
            left = ends - time.monotonic()
            if left <= 0:
                hint = (status.error and hint_for(status.error)) or "`kvstow doctor` shows problems"
                words = f"not {condition} after {timeout:g} s: {status.words}"
                raise CommandError(words, f"{hint}; --timeout waits longer", ExitCode.NOT_READY)
            lines.show(status.words)
            time.sleep(min(_POLL_SECONDS, left))
    click.echo(status.words)


class _Lines:
    """Prints the first status at once, and then a line every five seconds at most, to spare logs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._said, self._next = clock, "", clock()

    def show(self, words: str) -> None:
        if words != self._said and self._clock() >= self._next:
            click.echo(f"waiting: {words}", err=True)
            self._said, self._next = words, self._clock() + _LINE_SECONDS


def _check(client: Client, condition: Condition) -> _Status:
    """A server that is unreachable or busy is waited for. Raises `ApiError` for a refusal that will not pass."""
    from kvstow_api.client import ApiError

    try:
        return _CHECKS[condition](client)
    except ApiError as error:
        if error.status is not None and error.status not in _PASSING:
            raise
        return _Status(False, str(error), error=error)


def _ready(client: Client) -> _Status:
    from kvstow_api.client import routes

    probe, readiness = client.call(routes.readyz, verbose=True), client.call(routes.get_readiness)
    if probe.ok:
        # a node is ready before the first engine attaches: there is no slot then
        return _Status(bool(readiness.usable_slots or not readiness.capacity_slots), _state(readiness))
    failed = [line for line in probe.text.splitlines() if line.startswith("[-]") and "(informational)" not in line]
    words = "; ".join(line.removeprefix("[-]") for line in failed) or "/readyz fails"
    return _Status(False, words)


def _pinned(client: Client) -> _Status:
    from kvstow_api.client import routes
    from kvstow_api.texts import populate_words

    readiness, is_node = client.call(routes.get_readiness), client.call(routes.get_info).node
    memory = readiness.memory
    is_populated = not is_node or memory.populated_bytes >= memory.target_bytes
    if readiness.usable_slots >= readiness.capacity_slots and is_populated:
        return _Status(True, _state(readiness))
    is_paused = any(pool.pinning_paused for pool in client.call(routes.list_pools).items)
    paused = "; pinning is paused: `kvstow pinning resume`" if is_paused else ""
    populated = f"; {populate_words(memory)}" if readiness.capacity_slots and not is_populated else ""
    return _Status(False, _state(readiness) + populated + paused)


def _drained(client: Client) -> _Status:
    from kvstow_api.client import routes
    from kvstow_api.texts import drain_words

    drain = client.call(routes.get_drain)
    hint = "" if drain.active else "; `kvstow drain` starts that"
    return _Status(drain.drained, drain_words(drain) + hint)


_CHECKS = {"ready": _ready, "pinned": _pinned, "drained": _drained}


def _state(readiness: ReadinessView) -> str:
    """How many slots are usable; also the reason, if the state is not on its way to ready."""
    if not readiness.capacity_slots:
        return f"{readiness.state}: {readiness.reason}"
    words = f"{readiness.state}: {readiness.usable_slots:,} of {readiness.capacity_slots:,} slots are usable"
    return words if readiness.state in ("ready", "pinning", "starting") else f"{words}; {readiness.reason}"
