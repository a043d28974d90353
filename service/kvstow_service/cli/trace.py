"""`kvstow trace` generates request traces, and records those of a live pool.

Recording runs where the command line alone is installed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext
from typing import TYPE_CHECKING, NamedTuple, TextIO

import click

from kvstow.bytesize import format_size
from kvstow.errors import ConfigError
from kvstow_api.texts import counted
from kvstow_service.cli.connection import SIZE, TIME, Invocation, chosen_pool, pool_flag, remote
from kvstow_service.cli.failures import CommandError, reporting_failures
from kvstow_service.replay.trace import (
    TraceShape,
    generate_trace,
)

if TYPE_CHECKING:
    from rich.progress import Progress


def progress() -> Progress:
    """Progress bars on standard error, if it is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@click.group()
def trace() -> None:
    """Generate request traces, or record those of a live pool."""


@trace.command()
@click.option("--sessions", type=int, default=100, show_default=True, help="Number of conversations.")
@click.option("--turns", type=int, default=5, show_default=True, help="Average number of turns of a conversation.")
@click.option("--requests", type=int, help="Only this many requests, the first.")
@click.option("--shared-prompts", type=int, default=4, show_default=True, help="Number of shared system prompts.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed and options give the same trace.")
@click.option("--output", default="-", show_default=True, help="File to write; - is standard output.")
def generate(sessions: int, turns: int, requests: int | None, shared_prompts: int, seed: int, output: str) -> None:
    """Generate multi-turn conversations with shared system prompts, as JSON lines."""
    with reporting_failures():
        shape = TraceShape(sessions=sessions, turns=turns, shared_prompts=shared_prompts, seed=seed)
        found = generate_trace(shape, limit=requests)
        with nullcontext(sys.stdout) if output == "-" else _open(output) as stream:
            stream.writelines(f"{request.to_line()}\n" for request in found)


_ENDS = {
    "time": "its time is over",
    "size": "it has reached its size (--size)",
    "slow": "it was read too slowly; a local --output, or a connection that is faster, keeps up",
}


@trace.command()
@click.option("--time", "seconds", type=TIME, default="10m", show_default=True, help="How long to record, at most.")
@click.option("--size", type=SIZE, default="64MiB", show_default=True, help="How much to record, at most.")
@click.option("--output", default="-", show_default=True, help="File to write; - is standard output.")
@pool_flag
@remote
def record(call: Invocation, seconds: float, size: float, output: str) -> None:
    """Record the requests of a live pool, until Ctrl-C.

    A line for each request that ends: when that was, which blocks it has used, and which of them it has looked up. In
    place of keys there are hashes under a random key, which the server throws away with the recording: they mean
    something in this recording alone. `kvstow replay` reads it. Changes need a credential, and so does this.
    """
    with ExitStack() as stack:
        client = stack.enter_context(call.client())
        name = chosen_pool(client, call.pool)
        stream = stack.enter_context(nullcontext(sys.stdout) if output == "-" else _open(output))
        bars = stack.enter_context(progress())
        lines = stack.enter_context(closing(client.record(name, seconds=seconds, max_bytes=int(size))))
        told = _copy(lines, stream, seconds, bars)
    words = f"{counted(told.requests, 'request')} of pool {name}, {format_size(told.num_bytes)}"
    if told.end is None:
        raise CommandError(f"the connection has ended before the recording: {words}", "what was received is kept")
    click.echo(f"the recording has ended: {told.end}; {words}", err=True)


class _Recorded(NamedTuple):
    """`end`: why it has ended, None if the server did not say."""

    requests: int
    num_bytes: int
    end: str | None


def _copy(lines: Iterator[str], stream: TextIO, seconds: float, bars: Progress) -> _Recorded:
    """Write the requests among the lines to `stream`."""
    begun, requests, num_bytes = time.monotonic(), 0, 0
    bar = bars.add_task("recording", total=seconds, count="0 requests")
    try:
        for line in lines:
            if line.startswith('{"recording"'):
                return _Recorded(requests, num_bytes, _ENDS[json.loads(line)["recording"]["end"]])
            if line:
                stream.write(f"{line}\n")
                requests, num_bytes = requests + 1, num_bytes + len(line) + 1
            count = f"{counted(requests, 'request')}, {format_size(num_bytes)}"
            bars.update(bar, completed=min(seconds, time.monotonic() - begun), count=count)
    except KeyboardInterrupt:
        return _Recorded(requests, num_bytes, "it was stopped")
    return _Recorded(requests, num_bytes, None)


def _open(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output", path, f"a writable file, or - ({error.strerror})") from error
