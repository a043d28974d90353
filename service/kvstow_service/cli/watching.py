"""Commands that observe a server: `kvstow doctor` shows what is wrong, `kvstow events` prints events as they happen,
and `kvstow wait` waits until the server is ready, pinned or drained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

import click

from kvstow_api.answers import EVENT_TYPES
from kvstow_api.texts import counted, event_words, moment
from kvstow_service.cli.connection import TIME, Invocation, pool_flag, remote
from kvstow_service.cli.failures import CommandError, ExitCode, hint_for
from kvstow_service.cli.output import STATE_STYLES, styled, text_of, wide_format_flag

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvstow.status import MemoryStatus
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
    found = counted(len(view.conditions), "condition") if view.conditions else "nothing is wrong"
    yield f"{found}; the doctor has checked {counted(len(view.checked), 'kind')} of conditions"
    if wide:
        yield from (f"not checked: {name}: {reason}" for name, reason in view.skipped.items())


# -- events -----------------------------------------------------------------------------------------------------------


_RETRY_SECONDS = 1.0


@click.command()
@click.option("--type", "types", multiple=True, type=click.Choice(EVENT_TYPES), help="Only this type; repeatable.")
@click.option(
    "--recent", type=click.IntRange(0, 1000), default=10, show_default=True, help="Number of past events to start with."
)
@click.option("--limit", type=click.IntRange(1), help="Stop after this many events.")
@wide_format_flag
@pool_flag
@remote
def events(call: Invocation, types: tuple[Any, ...], recent: int, limit: int | None) -> None:
    """Print events as they happen, until Ctrl-C.

    Events of blocks, which are `stored` and `removed`, come only if --type names them, and only those of one pool.
    After a lost connection the stream resumes where it was. wide shows ids and all fields, and json prints one object a
    line.
    """
    stream = _stream(call, types, recent)
    try:
        for event in islice(stream, limit):
            click.echo(text_of(event, call.style, _line_with_fields if call.style == "wide" else _line, one_line=True))
    except KeyboardInterrupt:
        click.get_current_context().exit()


def _stream(call: Invocation, types: tuple[Any, ...], recent: int) -> Iterator[EventView]:
    """Yield events, over as many connections as needed. Raises `ApiError` if the first one fails or the server
    refuses."""
    from kvstow_api.client import ApiError

    has_answered, after = False, None
    with call.client() as client:
        while True:
            try:
                for event in client.events(types, after=after, recent=recent, pool=call.pool):
                    has_answered, after, recent = True, event.id or after, 0
                    yield event
            except ApiError as error:
                if error.problem is not None or not has_answered:
                    raise
                click.echo(f"{error}; trying again", err=True)
            time.sleep(_RETRY_SECONDS)


def _line(event: EventView) -> str:
    time = event.data.get("time")
    when = moment(None if time is None else datetime.fromisoformat(time))
    return f"{when:25}  {event.type:9}  {event_words(event.type, event.data)}"


def _line_with_fields(event: EventView) -> str:
    fields = {name: value for name, value in event.data.items() if name != "time" and value not in (None, "")}
    return "  ".join([_line(event), *(f"{name}={value}" for name, value in fields.items()), f"id={event.id}"])


# -- wait -------------------------------------------------------------------------------------------------------------


Condition = Literal["ready", "pinned", "drained"]

_POLL_SECONDS = 0.25
_LINE_SECONDS = 5.0
_PASSING = (429, 502, 503, 504)
"""Statuses that a later request may not get: the server is only busy or starting."""


class Status(NamedTuple):
    """Whether the condition is met, and the state of the server in words. `error` says why the server did not
    answer."""

    met: bool
    words: str
    error: ApiError | None = None
    memory: MemoryStatus | None = None
    """The memory of a node, if the command waits for a node."""


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
    with call.client() as client, Waiting() as waiting:
        while not (status := _check(client, condition)).met:
            left = ends - time.monotonic()
            if left <= 0:
                hint = (status.error and hint_for(status.error)) or "`kvstow doctor` shows problems"
                words = f"not {condition} after {timeout:g} s: {status.words}"
                raise CommandError(words, f"{hint}; --timeout waits longer", ExitCode.NOT_READY)
            waiting.show(status)
            time.sleep(min(_POLL_SECONDS, left))
    click.echo(status.words)


class Waiting:
    """Shows what the command waits for. A terminal shows the newest status, with a bar while memory is populated.
    Otherwise the first status is printed at once, and then at most one line every five seconds, to keep logs short."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live

        self._clock, self._said, self._next = clock, "", clock()
        console = Console(stderr=True, highlight=False)
        self._live = Live(console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: Status) -> None:
        if self._live is not None:
            self._live.update(_drawn(status))
        elif status.words != self._said and self._clock() >= self._next:
            click.echo(f"waiting: {status.words}", err=True)
            self._said, self._next = status.words, self._clock() + _LINE_SECONDS


def _drawn(status: Status) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    words = Text(f"waiting: {status.words}")
    if status.memory is None:
        return words
    return Group(words, ProgressBar(max(status.memory.target_bytes, 1), status.memory.populated_bytes, width=60))


def _check(client: Client, condition: Condition) -> Status:
    """Check the condition. A server that is unreachable or busy may pass later. Raises `ApiError` for a refusal that
    will not pass."""
    from kvstow_api.client import ApiError

    try:
        return _CHECKS[condition](client)
    except ApiError as error:
        if error.status is not None and error.status not in _PASSING:
            raise
        return Status(False, str(error), error=error)


def _ready(client: Client) -> Status:
    from kvstow_api.client import routes

    probe, readiness = client.call(routes.readyz, verbose=True), client.call(routes.get_readiness)
    if probe.ok:
        # A node is ready before the first engine attaches, and has no slot then.
        return Status(bool(readiness.usable_slots or not readiness.capacity_slots), _state(readiness))
    failed = [line for line in probe.text.splitlines() if line.startswith("[-]") and "(informational)" not in line]
    words = "; ".join(line.removeprefix("[-]") for line in failed) or "/readyz fails"
    return Status(False, words)


def _pinned(client: Client) -> Status:
    from kvstow_api.client import routes
    from kvstow_api.texts import populate_words

    readiness, is_node = client.call(routes.get_readiness), client.call(routes.get_info).node
    memory = readiness.memory
    is_populated = not is_node or memory.populated_bytes >= memory.target_bytes
    if readiness.usable_slots >= readiness.capacity_slots and is_populated:
        return Status(True, _state(readiness))
    is_paused = any(pool.pinning_paused for pool in client.call(routes.list_pools).items)
    paused = "; pinning is paused: `kvstow pinning resume`" if is_paused else ""
    populated = f"; {populate_words(memory)}" if readiness.capacity_slots and not is_populated else ""
    return Status(False, _state(readiness) + populated + paused, memory=memory if is_node else None)


def _drained(client: Client) -> Status:
    from kvstow_api.client import routes
    from kvstow_api.texts import drain_words

    drain = client.call(routes.get_drain)
    hint = "" if drain.active else "; `kvstow drain` starts that"
    return Status(drain.drained, drain_words(drain) + hint)


_CHECKS = {"ready": _ready, "pinned": _pinned, "drained": _drained}


def _state(readiness: ReadinessView) -> str:
    """Say how many slots are usable. The reason is added if the state does not lead to ready by itself."""
    if not readiness.capacity_slots:
        return f"{readiness.state}: {readiness.reason}"
    words = f"{readiness.state}: {readiness.usable_slots:,} of {readiness.capacity_slots:,} slots are usable"
    return words if readiness.state in ("ready", "pinning", "starting") else f"{words}; {readiness.reason}"
