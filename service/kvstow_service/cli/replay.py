"""`kvstow replay`: a request trace through the engine, without a server."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, cast

import typer

from kvstow.config import CopyStrategy
from kvstow.errors import ConfigError, KvstowError
from kvstow_service.place import Place
from kvstow_service.shapes import SHAPES, DeviceName, Shape, even_shape, shape_named
from kvstow_service.stop import StopRequests

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvstow.config import EngineConfig
    from kvstow_service.replay.pace import ReplayOptions
    from kvstow_service.replay.result import ReplayResult
    from kvstow_service.replay.session import Session
    from kvstow_service.replay.trace import TraceRequest

_SLOT_SIZE = "256KiB"
EXIT_MISMATCH = 1
EXIT_BAD_INPUT = 2


def replay(
    trace: Annotated[str, typer.Argument(help="Trace file, JSON lines; - reads standard input.", metavar="TRACE")],
    pool_slots: Annotated[int, typer.Option(help="Slots of the pool, per rank.")] = 1000,
    slot_size: Annotated[
        str | None, typer.Option(help="Bytes of one block, per rank; 256KiB if neither this nor a shape is given.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help=f"KV cache of a known model in place of a slot size: {' or '.join(SHAPES)}.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device that holds the KV cache: cpu or cuda.")] = "cpu",
    copy_strategy: Annotated[
        str, typer.Option(help="On CUDA, copy page by page (direct), in packed blocks (staged), or as measured (auto).")
    ] = "auto",
    requests: Annotated[int | None, typer.Option(min=1, help="Replay so many requests at most.")] = None,
    ranks: Annotated[int, typer.Option(help="Ranks in this process.")] = 1,
    policy: Annotated[str, typer.Option(help="Order of eviction: lru or arc.")] = "lru",
    rate: Annotated[float | None, typer.Option(help="Requests started per second; default: all at once.")] = None,
    time_scale: Annotated[
        float | None, typer.Option(help="Start requests by their timestamps, so many times as fast as recorded.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight at once.")] = 1,
    kv_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the device's KV cache; default: what the trace needs.")
    ] = None,
    no_data: Annotated[bool, typer.Option("--no-data", help="Replay the control plane only; move no bytes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Replay a request trace: look up, load, compute, store, and verify every loaded byte.

    Exit codes: 0 every loaded byte was right, 1 some was wrong, 2 bad input or not enough memory.
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
        typer.echo(f"kvstow replay: {error}", err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from error
    _print(result, as_json=as_json)
    if not result.ok:
        raise typer.Exit(EXIT_MISMATCH)


def _shape(name: str | None, slot_size: str | None) -> Shape:
    from kvstow.bytesize import parse_size

    if name is not None and slot_size is not None:
        raise ConfigError("--slot-size", slot_size, "a slot size or a shape, not both")
    return shape_named(name) if name else even_shape(parse_size(slot_size or _SLOT_SIZE, "--slot-size"))


def _run(
    config: EngineConfig,
    options: ReplayOptions,
    requests: list[TraceRequest],
    kv_blocks: int | None,
    place: Place | None,
) -> ReplayResult:
    """Without a place for a KV cache, the control plane alone."""
    from kvstow_service.replay.driver import ReplayDriver, blocks_needed
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
                parts.engine,
                parts.workers,
                parts.kv,
                requests,
                options,
                kv_blocks=blocks,
                on_request=lambda count: progress.update(replayed, completed=count),
            )
            return driver.run(stops.requested)


def _progress() -> Progress:
    """Bars on standard error, so that --json stays clean; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print(result: ReplayResult, *, as_json: bool) -> None:
    from rich.console import Console

    from kvstow_service.replay.summary import print_rows, summary_rows

    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        print_rows(summary_rows(result), Console(), title="Replay")
