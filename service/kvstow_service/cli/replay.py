"""`kvstow replay`: a request trace through an engine of its own, or through engines that attach to a node service; or
what it hits in pools of several sizes. `kvstow trace` generates traces, and records them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, NamedTuple, TextIO

import click

from kvstow.bytesize import format_size, parse_size
from kvstow.config import ALLOWED_POLICIES, parse_policy
from kvstow.errors import ConfigError, KvstowError, MissingPackageError, ProcessEndedError, SettingError
from kvstow_api.texts import counted
from kvstow_service.cli.connection import SIZE, TIME, Connection, chosen_pool, pool_flag, remote
from kvstow_service.cli.failures import CommandError, ExitCode, reporting_failures
from kvstow_service.process.stop import StopRequests
from kvstow_service.replay.trace import SHAPES, Shape, even_shape, shape_named

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvstow.config import EngineConfig
    from kvstow_service.replay.hittable import HitTable
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
    if name is not None and slot_size is not None:
        raise ConfigError("--slot-size", slot_size, "--slot-size or --shape, not both")
    return shape_named(name) if name else even_shape(parse_size(slot_size or _SLOT_SIZE, "--slot-size"))


_NOT_WITH_SIZES = {
    "--attach": "the pools of a table are made here",
    "--engines": "a table has one engine for each pool",
    "--pool-slots": "--sizes has the sizes",
    "--port": "there is no server",
    "--rate": "a table has the time of the trace",
    "--time-scale": "a table has the time of the trace",
    "--prefill-rate": "nothing is computed",
    "--kv-blocks": "nothing is loaded",
}


def check_sizes(given: Mapping[str, object], *, no_data: bool) -> None:
    """Raises `SettingError` for options that contradict --sizes."""
    if not no_data:
        raise SettingError("--sizes", given["--sizes"], "needs --no-data: a table moves no bytes")
    for name, reason in _NOT_WITH_SIZES.items():
        if given[name] is not None:
            raise SettingError(name, given[name], f"cannot be used with --sizes: {reason}")


def parse_sizes(text: str, slot_bytes: int) -> list[int]:
    """Slots, from the smallest on. A plain number is one of slots, a size with a unit one of bytes on all ranks; then
    `slot_bytes` are those of a slot. Raises `ConfigError`."""
    found = set()
    for part in filter(None, (one.strip() for one in text.split(","))):
        slots = int(part) if part.isdecimal() else parse_size(part, "--sizes") // slot_bytes
        if slots < 1:
            raise ConfigError("--sizes", part, f"1 slot or more; a slot has {slot_bytes} bytes on all ranks")
        found.add(slots)
    if not found:
        raise ConfigError("--sizes", text, "slots, or bytes with a unit, separated by commas: 1000,64GiB")
    return sorted(found)


def parse_policies(names: Sequence[str]) -> list[str]:
    """For a table. Raises `ConfigError`."""
    from kvstow_service.replay.hittable import FORESIGHT

    try:
        return [name if name == FORESIGHT else parse_policy(name) for name in names]
    except ConfigError as error:
        raise ConfigError("--policy", error.value, f"{ALLOWED_POLICIES}; or {FORESIGHT}, with foresight") from None


def run_table(found: list[TraceRequest], sizes: list[int], policies: list[str], slot_bytes: int) -> HitTable:
    from kvstow_service.replay.hittable import hit_table

    with _progress() as progress:
        replayed = progress.add_task("replaying", total=len(found) * len(sizes) * len(policies))
        return hit_table(found, sizes, policies, slot_bytes, lambda count: progress.update(replayed, completed=count))


def _print_table(table: HitTable, png: Path | None, *, as_json: bool) -> None:
    from kvstow_service.cli.plotting import Line, Plot, drawn, save

    plot = Plot(
        title="% of the blocks that hit, by size",
        sizes=table.sizes,
        labels=[format_size(slots * table.slot_bytes) for slots in table.sizes],
        lines=[Line(policy, found) for policy, found in table.ratios.items()],
        limit=table.everything,
        limit_name="without evictions",
    )
    if png is not None:
        save(plot, png)
    if as_json:
        click.echo(json.dumps(table.to_json()))
        return
    rows = [("SLOTS", "SIZE", *(policy.upper() for policy in table.ratios))]
    for number, slots in enumerate(table.sizes):
        ratios = (f"{100 * found[number]:.2f} %" for found in table.ratios.values())
        rows.append((f"{slots:,}", plot.labels[number], *ratios))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    click.echo(
        f"{table.requests:,} requests looked up {table.blocks:,} blocks; "
        f"without evictions {100 * table.everything:.2f} % of them would hit\n"
    )
    click.echo(drawn(plot, min(100, get_terminal_size().columns)))


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
    "policies",
    multiple=True,
    help=f"How the pool chooses what it evicts: {ALLOWED_POLICIES}. Default: auto; with --attach, the service's. "
    "With --sizes repeatable, by default auto and lru; min evicts with foresight.",
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
@click.option(
    "--sizes",
    metavar="SIZE,...",
    help="With --no-data: replay with each policy at each of these sizes, in slots, or in bytes of all ranks (64GiB). "
    "Prints a table and draws it.",
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --sizes: also draw the table into this file; needs matplotlib.",
)
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
    policies: tuple[str, ...],
    rate: float | None,
    time_scale: float | None,
    concurrency: int,
    kv_blocks: int | None,
    port: int | None,
    prefill_rate: float | None,
    no_data: bool,
    sizes: str | None,
    png: Path | None,
    as_json: bool,
) -> None:
    """Replay a request trace and verify every loaded byte.

    Each request is looked up, its hits are loaded, the rest is computed and stored. TRACE is a file of JSON lines; -
    reads standard input.

    With --attach each engine is a process, and so is each of its ranks. They continue without the service while it is
    away, and an engine that dies is started again. Engines of equal slot size and ranks share what they store.

    If the service has a fleet tier, blocks may come from it; with --prefill-rate, a fetch has to be faster than
    computing the same blocks.

    With --no-data --sizes, only a control plane runs for each size and policy, in the time of the trace: what would hit
    in pools of other sizes.

    Exit codes: 0 all loaded bytes were correct, 1 some were not, 2 bad input or not enough memory.
    """
    from kvstow.config import EngineConfig
    from kvstow_service.replay.trace import BLOCK_TOKENS, ReplayOptions, read_trace

    result: ReplayResult | AttachedResult
    try:
        require_packages()
        from kvstow_service.replay.driver import blocks_needed

        cut = shape_of(shape, slot_size)
        if sizes is not None:
            given = {
                "--sizes": sizes, "--attach": attach, "--engines": engines, "--pool-slots": pool_slots, "--port": port,
                "--rate": rate, "--time-scale": time_scale, "--prefill-rate": prefill_rate, "--kv-blocks": kv_blocks,
            }  # fmt: skip
            check_sizes(given, no_data=no_data)
            slots = parse_sizes(sizes, cut.slot_bytes * ranks)
            chosen = parse_policies(policies or ("auto", "lru"))
            found = read_trace(trace, limit=requests)
            _print_table(run_table(found, slots, chosen, cut.slot_bytes * ranks), png, as_json=as_json)
            return
        if png is not None:
            raise SettingError("--png", str(png), "needs --no-data and --sizes")
        if len(policies) > 1:
            raise SettingError("--policy", ", ".join(policies), "can be repeated only with --no-data and --sizes")
        policy = policies[0] if policies else None
        check_attach(attach, engines, policy, no_data=no_data)
        check_port(port, attach, no_data=no_data)
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
    """Generate request traces, or record those of a live pool."""


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
def record(connection: Connection, seconds: float, size: float, output: str, pool: str | None) -> None:
    """Record the requests of a live pool, until Ctrl-C.

    A line for each request that ends: when that was, which blocks it has used, and which of them it has looked up. In
    place of keys there are hashes under a random key, which the server throws away with the recording: they mean
    something in this recording alone. `kvstow replay` reads it. Changes need a credential, and so does this.
    """
    with ExitStack() as stack:
        client = stack.enter_context(connection.client())
        name = chosen_pool(client, pool)
        stream = stack.enter_context(nullcontext(sys.stdout) if output == "-" else _open(output))
        bars = stack.enter_context(_progress_of_time())
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
    bar = bars.add_task("recording", total=seconds, requests="0 requests")
    try:
        for line in lines:
            if line.startswith('{"recording"'):
                return _Recorded(requests, num_bytes, _ENDS[json.loads(line)["recording"]["end"]])
            if line:
                stream.write(f"{line}\n")
                requests, num_bytes = requests + 1, num_bytes + len(line) + 1
            shown = f"{counted(requests, 'request')}, {format_size(num_bytes)}"
            bars.update(bar, completed=min(seconds, time.monotonic() - begun), requests=shown)
    except KeyboardInterrupt:
        return _Recorded(requests, num_bytes, "it was stopped")
    return _Recorded(requests, num_bytes, None)


def _progress_of_time() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[requests]}"))
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)


def _open(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output", path, f"a writable file, or - ({error.strerror})") from error
