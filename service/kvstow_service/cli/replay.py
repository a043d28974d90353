"""Commands on request traces: replay one through an engine of its own, or generate one."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TextIO, cast

import click

from kvstow.config import CopyStrategy
from kvstow.errors import ConfigError, KvstowError
from kvstow_service.cli.failures import ExitCode, reporting_failures
from kvstow_service.replay.place import Place
from kvstow_service.replay.shapes import SHAPES, DeviceName, Shape, even_shape, shape_named
from kvstow_service.stop import StopRequests

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvstow.config import EngineConfig
    from kvstow_service.replay.pace import ReplayOptions
    from kvstow_service.replay.result import ReplayResult
    from kvstow_service.replay.session import Session
    from kvstow_service.replay.trace import TraceRequest

_SLOT_SIZE = "256KiB"


@click.command()
@click.argument("trace")
@click.option("--pool-slots", type=int, default=1000, show_default=True, help="Slots of the pool of each rank.")
@click.option("--slot-size", help="Bytes of one block on each rank. Default: 256KiB.")
@click.option("--shape", help=f"KV cache of a known model instead of a slot size: {', '.join(SHAPES)}.")
@click.option("--device", default="cpu", show_default=True, help="Device that holds the KV cache: cpu or cuda.")
@click.option(
    "--copy-strategy",
    default="auto",
    show_default=True,
    help="On CUDA: direct copies pages, staged copies packed blocks, auto measures which is faster.",
)
@click.option("--requests", type=click.IntRange(1), help="Replay at most this many requests.")
@click.option("--ranks", type=int, default=1, show_default=True, help="Ranks in this process.")
@click.option("--policy", default="lru", show_default=True, help="Order of eviction: lru or arc.")
@click.option("--rate", type=float, help="Requests started per second. Default: all at once.")
@click.option("--time-scale", type=float, help="Start requests by their timestamps, this many times as fast.")
@click.option("--concurrency", type=int, default=1, show_default=True, help="Requests in flight at once.")
@click.option("--kv-blocks", type=int, help="Blocks of the device's KV cache. Default: what the trace needs.")
@click.option("--no-data", is_flag=True, help="Replay the control plane only; move no bytes.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def replay(
    trace: str,
    pool_slots: int,
    slot_size: str | None,
    shape: str | None,
    device: str,
    copy_strategy: str,
    requests: int | None,
    ranks: int,
    policy: str,
    rate: float | None,
    time_scale: float | None,
    concurrency: int,
    kv_blocks: int | None,
    no_data: bool,
    as_json: bool,
) -> None:
    """Replay a request trace and verify every loaded byte.

    Each request is looked up, its hits are loaded, the rest is computed and stored. TRACE is a file of JSON lines; -
    reads standard input.

    Exit codes: 0 all loaded bytes were correct, 1 some were not, 2 bad input or not enough memory.
    """
    from kvstow.config import EngineConfig
    from kvstow_service.replay.pace import ReplayOptions
    from kvstow_service.replay.trace import BLOCK_TOKENS, read_trace

    try:
        cut = _shape(shape, slot_size)
        place = Place(cast(DeviceName, device), cut, cast(CopyStrategy, copy_strategy))  # it checks both
        config = EngineConfig(
            slot_bytes=cut.slot_bytes,
            capacity_slots=pool_slots,
            num_ranks=ranks,
            policy=policy,
            block_tokens=BLOCK_TOKENS,
        )
        options = ReplayOptions(concurrency=concurrency, rate=rate, time_scale=time_scale)
        result = _run(config, options, read_trace(trace, limit=requests), kv_blocks, None if no_data else place)
    except KvstowError as error:
        click.echo(f"kvstow replay: {error}", err=True)
        sys.exit(ExitCode.USAGE)
    _print(result, as_json=as_json)
    if not result.ok:
        sys.exit(ExitCode.ERROR)


def _shape(name: str | None, slot_size: str | None) -> Shape:
    from kvstow.bytesize import parse_size

    if name is not None and slot_size is not None:
        raise ConfigError("--slot-size", slot_size, "--slot-size or --shape, not both")
    return shape_named(name) if name else even_shape(parse_size(slot_size or _SLOT_SIZE, "--slot-size"))


def _run(
    config: EngineConfig,
    options: ReplayOptions,
    requests: list[TraceRequest],
    kv_blocks: int | None,
    place: Place | None,
) -> ReplayResult:
    """`place`: None replays the control plane alone."""
    from kvstow_service.replay.driver import ReplayDriver, blocks_needed
    from kvstow_service.replay.offload import EmbeddedOffload
    from kvstow_service.replay.session import local_session, simulated_session

    blocks = kv_blocks or blocks_needed(requests, options.concurrency)
    with StopRequests() as stops, _progress() as progress:
        replayed = progress.add_task("replaying", total=len(requests), start=False)
        session: AbstractContextManager[Session]
        if place is None:
            session = simulated_session(config)
        else:
            pinned = progress.add_task("pinning", total=config.capacity_slots)
            session = local_session(
                config,
                kv_blocks=blocks,
                place=place,
                stop=stops.requested,
                on_pinned=lambda slots: progress.update(pinned, completed=slots),
            )
        with session as parts:
            progress.start_task(replayed)
            driver = ReplayDriver(
                EmbeddedOffload(parts.engine),
                parts.workers,
                parts.kv,
                requests,
                options,
                kv_blocks=blocks,
                on_request=lambda count: progress.update(replayed, completed=count),
            )
            return driver.run(stops.requested)


def _progress() -> Progress:
    """Progress bars on standard error, if it is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print(result: ReplayResult, *, as_json: bool) -> None:
    from rich.console import Console

    from kvstow_service.replay.summary import print_rows, summary_rows

    if as_json:
        click.echo(json.dumps(result.to_json()))
    else:
        print_rows(summary_rows(result), Console(), title="Replay")


@click.group()
def trace() -> None:
    """Generate request traces."""


@trace.command()
@click.option("--sessions", type=int, default=100, show_default=True, help="Number of conversations.")
@click.option("--turns", type=int, default=5, show_default=True, help="Average number of turns of a conversation.")
@click.option("--requests", type=int, help="Only this many requests, the first.")
@click.option(
    "--shared-prompts",
    type=int,
    default=4,
    show_default=True,
    help="Number of shared system prompts.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed and options give the same trace.")
@click.option("--output", default="-", show_default=True, help="File to write; - is standard output.")
def generate(sessions: int, turns: int, requests: int | None, shared_prompts: int, seed: int, output: str) -> None:
    """Generate multi-turn conversations with shared system prompts, as JSON lines."""
    from kvstow_service.replay.generate import TraceShape, generate_trace

    with reporting_failures():
        shape = TraceShape(sessions=sessions, turns=turns, shared_prompts=shared_prompts, seed=seed)
        found = generate_trace(shape, limit=requests)
        with nullcontext(sys.stdout) if output == "-" else _open(output) as stream:
            stream.writelines(f"{request.to_line()}\n" for request in found)


def _open(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output", path, f"a writable file, or - ({error.strerror})") from error
