"""`kvstow replay`: a request trace through an engine of its own, or through engines that attach to a node service.
`kvstow trace` generates traces."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from kvstow.config import ALLOWED_POLICIES, parse_policy
from kvstow.errors import ConfigError, KvstowError, MissingPackageError, ProcessEndedError, SettingError
from kvstow_service.cli.failures import ExitCode, reporting_failures
from kvstow_service.process.stop import StopRequests
from kvstow_service.replay.trace import SHAPES, Shape, even_shape, shape_named

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvstow.config import EngineConfig
    from kvstow_service.replay.launcher import AttachedResult
    from kvstow_service.replay.ranks import ReplaySession
    from kvstow_service.replay.result import ReplayResult
    from kvstow_service.replay.trace import ReplayOptions, TraceRequest

# -- options ----------------------------------------------------------------------------------------------------------


_SLOT_SIZE = "256KiB"


def require_packages() -> None:
    """Raises `MissingPackageError` where the command line is installed alone, as in its image."""
    for package in ("msgspec", "numpy"):
        if find_spec(package) is None:
            raise MissingPackageError("a replay", package, "cli")


def check_attach(attach: str | None, engines: int | None, policy: str | None, *, no_data: bool) -> None:
    """Raises `SettingError` for options that contradict --attach, or need it."""
    if attach is None:
        if engines is not None:
            raise SettingError("--engines", engines, "needs --attach: without it there is one engine, in this process")
        return
    if policy is not None:
        raise SettingError(
            "--policy", policy, "cannot be used with --attach: the pool is the service's; see kvstow config"
        )
    if no_data:
        raise SettingError("--no-data", True, "cannot be used with --attach: attached ranks move bytes")


def check_port(port: int | None, attach: str | None, *, no_data: bool) -> None:
    """Raises `SettingError` for options that contradict --port."""
    if port is None:
        return
    if attach is not None:
        raise SettingError("--port", port, "cannot be used with --attach: the node service has an admin server")
    if no_data:
        raise SettingError("--port", port, "cannot be used with --no-data")


def attach_path(attach: str) -> Path:
    from kvstow.attach.connection import socket_path

    try:
        return socket_path(attach)
    except ConfigError as error:
        raise error.renamed("--attach") from None


def shape_of(name: str | None, slot_size: str | None) -> Shape:
    from kvstow.bytesize import parse_size

    if name is not None and slot_size is not None:
        raise ConfigError("--slot-size", slot_size, "--slot-size or --shape, not both")
    return shape_named(name) if name else even_shape(parse_size(slot_size or _SLOT_SIZE, "--slot-size"))


# -- the two ways to run a trace --------------------------------------------------------------------------------------


def run_here(
    config: EngineConfig,
    options: ReplayOptions,
    requests: list[TraceRequest],
    blocks: int,
    shape: Shape | None,
    port: int | None,
) -> ReplayResult:
    """`shape`: None replays the control plane alone. `port`: None for no admin server."""
    from kvstow_service.replay.driver import ReplayDriver
    from kvstow_service.replay.offload import EmbeddedOffload
    from kvstow_service.replay.ranks import local_session, replay_admin, simulated_session

    with StopRequests() as stops, _progress() as progress, ExitStack() as stack:
        replayed = progress.add_task("replaying", total=len(requests), start=False)
        session: AbstractContextManager[ReplaySession]
        if shape is None:
            session = simulated_session(config)
        else:
            pinned = progress.add_task("pinning", total=config.capacity_slots)
            session = local_session(
                config,
                kv_blocks=blocks,
                shape=shape,
                stop=stops.requested,
                on_pinned=lambda slots: progress.update(pinned, completed=slots),
            )
        parts = stack.enter_context(session)
        if port is not None:
            stack.enter_context(replay_admin(parts, port))
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


def run_attached(
    path: Path,
    engines: int,
    shape: Shape,
    ranks: int,
    blocks: int,
    wanted_bytes: int,
    requests: list[TraceRequest],
    options: ReplayOptions,
) -> AttachedResult:
    from kvstow_service.replay.driver import check_fits
    from kvstow_service.replay.engineprocess import EngineSpec
    from kvstow_service.replay.launcher import EngineLauncher

    check_fits(requests, blocks)
    specs = [
        EngineSpec(f"replay-{number}", path, shape, ranks, blocks, wanted_bytes, requests, options)
        for number in range(1, engines + 1)
    ]
    with StopRequests() as stops, _progress() as progress:
        replayed = progress.add_task("replaying", total=len(requests) * engines)
        launcher = EngineLauncher(
            specs,
            on_request=lambda count: progress.update(replayed, completed=count),
            log=lambda line: click.echo(f"kvstow replay: {line}", err=True),
        )
        result = launcher.run(stops.requested)
    for engine in result.engines:
        if engine.problem is not None:
            click.echo(f"kvstow replay: {engine.name} was not attached at its end: {engine.problem}", err=True)
    return result


def _progress() -> Progress:
    """Progress bars on standard error, if it is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


# -- replay -----------------------------------------------------------------------------------------------------------


_POOL_SLOTS = 1000
_POSITIVE = click.FloatRange(0, min_open=True)


@click.command()
@click.argument("trace")
@click.option(
    "--attach", metavar="unix:PATH", help="Attach to the node service on this socket instead of making a pool here."
)
@click.option(
    "--engines", type=click.IntRange(1), help="With --attach: engines that replay the trace at once. Default: 1."
)
@click.option(
    "--pool-slots",
    type=click.IntRange(1),
    help="Slots of the pool of each rank. Default: 1000; with --attach, what the service has.",
)
@click.option("--slot-size", help="Bytes of one block on each rank. Default: 256KiB.")
@click.option("--shape", help=f"KV cache of a known model instead of a slot size: {', '.join(SHAPES)}.")
@click.option("--requests", type=click.IntRange(1), help="Replay at most this many requests.")
@click.option(
    "--ranks",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Ranks; with --attach, processes of each engine.",
)
@click.option(
    "--policy",
    help=f"How the pool chooses what it evicts: {ALLOWED_POLICIES}. Default: auto; with --attach, the service's.",
)
@click.option("--rate", type=_POSITIVE, help="Requests started per second. Default: all at once.")
@click.option("--time-scale", type=_POSITIVE, help="Start requests by their timestamps, this many times as fast.")
@click.option("--concurrency", type=click.IntRange(1), default=1, show_default=True, help="Requests in flight at once.")
@click.option("--kv-blocks", type=click.IntRange(1), help="Blocks of the KV cache. Default: what the trace needs.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Serve the admin API on this port of 127.0.0.1 meanwhile; the next 15 are tried if it is taken.",
)
@click.option("--prefill-rate", type=_POSITIVE, help="Tokens per second that an engine computes. Default: no limit.")
@click.option("--no-data", is_flag=True, help="Replay the control plane only; move no bytes.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def replay(
    trace: str,
    attach: str | None,
    engines: int | None,
    pool_slots: int | None,
    slot_size: str | None,
    shape: str | None,
    requests: int | None,
    ranks: int,
    policy: str | None,
    rate: float | None,
    time_scale: float | None,
    concurrency: int,
    kv_blocks: int | None,
    port: int | None,
    prefill_rate: float | None,
    no_data: bool,
    as_json: bool,
) -> None:
    """Replay a request trace and verify every loaded byte.

    Each request is looked up, its hits are loaded, the rest is computed and stored. TRACE is a file of JSON lines; -
    reads standard input.

    With --attach each engine is a process, and so is each of its ranks. They continue without the service while it is
    away, and an engine that dies is started again. Engines of equal slot size and ranks share what they store.

    If the service has a fleet tier, blocks may come from it; with --prefill-rate, a fetch has to be faster than
    computing the same blocks.

    Exit codes: 0 all loaded bytes were correct, 1 some were not, 2 bad input or not enough memory.
    """
    from kvstow.config import EngineConfig
    from kvstow_service.replay.trace import BLOCK_TOKENS, ReplayOptions, read_trace

    result: ReplayResult | AttachedResult
    try:
        require_packages()
        from kvstow_service.replay.driver import blocks_needed

        check_attach(attach, engines, policy, no_data=no_data)
        check_port(port, attach, no_data=no_data)
        cut = shape_of(shape, slot_size)
        config = EngineConfig(
            slot_bytes=cut.slot_bytes,
            capacity_slots=_POOL_SLOTS if pool_slots is None else pool_slots,
            num_ranks=ranks,
            policy="auto" if policy is None else parse_policy(policy),
            block_tokens=BLOCK_TOKENS,
        )
        options = ReplayOptions(concurrency=concurrency, rate=rate, time_scale=time_scale, prefill_rate=prefill_rate)
        path = None if attach is None else attach_path(attach)
        found = read_trace(trace, limit=requests)
        blocks = kv_blocks or blocks_needed(found, concurrency)
        if path is None:
            result = run_here(config, options, found, blocks, None if no_data else cut, port)
        else:
            wanted = 0 if pool_slots is None else pool_slots * cut.slot_bytes * ranks
            result = run_attached(path, engines or 1, cut, ranks, blocks, wanted, found, options)
    except ProcessEndedError as error:
        click.echo(f"kvstow replay: {error}", err=True)
        sys.exit(ExitCode.ERROR)
    except KvstowError as error:
        click.echo(f"kvstow replay: {error}", err=True)
        sys.exit(ExitCode.USAGE)
    _print(result, as_json=as_json)
    if not result.ok:
        sys.exit(ExitCode.ERROR)


def _print(result: ReplayResult | AttachedResult, *, as_json: bool) -> None:
    from rich.console import Console

    from kvstow_service.replay.launcher import AttachedResult
    from kvstow_service.replay.summary import attached_rows, print_rows, summary_rows

    if as_json:
        click.echo(json.dumps(result.to_json()))
        return
    rows = attached_rows(result) if isinstance(result, AttachedResult) else summary_rows(result)
    print_rows(rows, Console(), title="Replay")


# -- trace ------------------------------------------------------------------------------------------------------------


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
    from kvstow_service.replay.trace import TraceShape, generate_trace

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
