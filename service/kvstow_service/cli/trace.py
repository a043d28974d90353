"""`kvstow trace` generates request traces, imports traces of other projects, and records those of a live pool.

Recording also runs where only the command line is installed.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TextIO, cast

import click

from kvstow.bytesize import format_size
from kvstow.errors import ConfigError
from kvstow_api.texts import counted
from kvstow_service.cli.connection import SIZE, TIME, Invocation, chosen_pool, pool_flag, remote
from kvstow_service.cli.failures import CommandError, ExitCode, reporting_failures
from kvstow_service.cli.progress import Bar, ProgressBars
from kvstow_service.replay.trace import Numbers, TraceShape, generate_trace, parse_line

if TYPE_CHECKING:
    from kvstow_service.replay.importing import ImportCounts


output_flag = click.option(
    "--output",
    default="-",
    show_default=True,
    help="File to write, compressed if its name ends with .gz; - is standard output.",
)


@click.group()
def trace() -> None:
    """Generate request traces, import those of others, or record those of a live pool."""


@trace.command()
@click.option("--sessions", type=int, default=100, show_default=True, help="Number of conversations.")
@click.option("--turns", type=int, default=5, show_default=True, help="Average number of turns of a conversation.")
@click.option("--requests", type=int, help="Only this many requests, the first.")
@click.option("--shared-prompts", type=int, default=4, show_default=True, help="Number of shared system prompts.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed and options give the same trace.")
@output_flag
def generate(sessions: int, turns: int, requests: int | None, shared_prompts: int, seed: int, output: str) -> None:
    """Generate multi-turn conversations with shared system prompts, as JSON lines."""
    with reporting_failures():
        shape = TraceShape(sessions=sessions, turns=turns, shared_prompts=shared_prompts, seed=seed)
        found = generate_trace(shape, limit=requests)
        with opened(output) as stream:
            stream.writelines(f"{request.to_line()}\n" for request in found)


_MOST_PROBLEMS = 20
"""How many problems of an import are named."""


@trace.command("import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--share-system",
    is_flag=True,
    help="Sessions with the same model and equally long tools and system prompts begin with the same blocks.",
)
@click.option(
    "--spread", type=TIME, default="12h", show_default=True, help="Sessions start at random moments of this time."
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed and files give the same trace.")
@output_flag
def import_(files: Sequence[str], share_system: bool, spread: float, seed: int, output: str) -> None:
    """Import the traces of others into the form that `kvstow replay` reads.

    Each FILE is a session of kv-cache-tester, or a folder of them; the sessions start at random times, and are merged
    by time. Or the one FILE is a trace of the Mooncake project. Files and requests that are damaged are named and
    skipped.
    """
    from kvstow_service.replay.importing import Importer, ImportOptions, session_files

    with reporting_failures(), ExitStack() as stack:
        options = ImportOptions(share_system=share_system, spread=spread, seed=seed)
        total = len(session_files(files))
        bars = stack.enter_context(ProgressBars())
        bar = bars.bar("importing", total)
        files_done = problems = 0

        def report_problem(problem: str) -> None:
            nonlocal problems
            problems += 1
            if problems <= _MOST_PROBLEMS:
                bars.say(f"skipped: {problem}")

        def count_file() -> None:
            nonlocal files_done
            files_done += 1
            bar(files_done, counted(importer.counts.requests, "request"))

        importer = Importer(options, on_problem=report_problem, on_file=count_file)
        requests = importer.read(files)
        first = next(requests, None)
        if first is None:
            raise CommandError("there are no requests to import", "check which files are given", ExitCode.USAGE)
        stream = stack.enter_context(opened(output))
        stream.writelines(f"{request.to_line()}\n" for request in chain([first], requests))
    click.echo(_import_words(importer.counts), err=True)


def _import_words(counts: ImportCounts) -> str:
    words = f"imported {counted(counts.requests, 'request')}"
    if counts.sessions:
        words += f" of {counted(counts.sessions, 'session')}"
    if counts.other_model:
        words += f"; left out {counted(counts.other_model, 'request')} to another model than their session's first"
    if problems := counts.skipped_files + counts.skipped_requests:
        words += f"; skipped {counted(counts.skipped_files, 'file')}, {counted(counts.skipped_requests, 'request')}"
        if problems > _MOST_PROBLEMS:
            words += f", of which the first {_MOST_PROBLEMS} are named above"
    return words


_ENDS = {
    "time": "its time is over",
    "size": "it has reached its size (--size)",
    "slow": "it was read too slowly; a local --output, or a connection that is faster, keeps up",
}


@trace.command()
@click.option("--time", "seconds", type=TIME, default="10m", show_default=True, help="How long to record, at most.")
@click.option("--size", type=SIZE, default="64MiB", show_default=True, help="How much to record, at most.")
@output_flag
@pool_flag
@remote
def record(call: Invocation, seconds: float, size: float, output: str) -> None:
    """Record the requests of a live pool, until Ctrl-C.

    Each request that ends becomes a line with its time, the blocks that it used, and those of them that it looked up.
    The lines have numbers in place of keys. The server makes the numbers from hashes under a random key, and throws
    this key away with the recording, so they mean nothing outside of it. `kvstow replay` reads the trace. The command
    needs a credential, as changes do.
    """
    with ExitStack() as stack:
        client = stack.enter_context(call.client())
        name = chosen_pool(client, call.pool)
        stream = stack.enter_context(opened(output))
        bar = stack.enter_context(ProgressBars()).bar("recording", seconds)
        lines = stack.enter_context(closing(client.record(name, seconds=seconds, max_bytes=int(size))))
        recorded = _copy(lines, stream, seconds, bar)
    words = f"{counted(recorded.requests, 'request')} of pool {name}, {format_size(recorded.num_bytes)}"
    if recorded.end is None:
        raise CommandError(f"the connection has ended before the recording: {words}", "what was received is kept")
    click.echo(f"the recording has ended: {recorded.end}; {words}", err=True)


class _Recorded(NamedTuple):
    """What was recorded. `end` says why the recording has ended, or is None if the server did not say."""

    requests: int
    num_bytes: int
    end: str | None


def _copy(lines: Iterator[str], stream: TextIO, seconds: float, bar: Bar) -> _Recorded:
    """Write the requests among the lines to `stream`, with their ids as runs."""
    begun, requests, num_bytes = time.monotonic(), 0, 0
    numbers = Numbers()
    try:
        for line in lines:
            if line.startswith('{"recording"'):
                return _Recorded(requests, num_bytes, _ENDS[json.loads(line)["recording"]["end"]])
            if line:
                request = parse_line(line.encode(), "what the server has sent")
                packed = request._replace(hash_ids=numbers.of(request.hash_ids)).to_line()
                stream.write(f"{packed}\n")
                requests, num_bytes = requests + 1, num_bytes + len(packed) + 1
            count = f"{counted(requests, 'request')}, {format_size(num_bytes)}"
            bar(min(seconds, time.monotonic() - begun), count)
    except KeyboardInterrupt:
        return _Recorded(requests, num_bytes, "it was stopped")
    return _Recorded(requests, num_bytes, None)


@contextmanager
def opened(path: str) -> Iterator[TextIO]:
    """Open the file for a trace, or standard output for `-`. Raises `ConfigError` if it cannot be written."""
    if path == "-":
        yield sys.stdout
        return
    try:
        with gzip.open(path, "wt", encoding="utf-8") if path.endswith(".gz") else open(path, "w") as stream:
            yield cast("TextIO", stream)
    except OSError as error:
        raise ConfigError("--output", path, f"a writable file, or - ({error.strerror})") from error
