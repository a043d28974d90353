"""`kvstow replay`: a request trace through an engine of its own, or through engines that attach to a node service."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from kvstow.config import CopyStrategy
from kvstow.errors import ConfigError, KvstowError, ProcessEndedError, SettingError
from kvstow.tier.writepolicy import WRITE_MODES
from kvstow_service.cli.failures import ExitCode
from kvstow_service.process.stop import StopRequests
from kvstow_service.replay.place import Place
from kvstow_service.replay.shapes import SHAPES, DeviceName, Shape, even_shape, shape_named

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress

    from kvstow.config import EngineConfig
    from kvstow.control.fleettier import TierSettings
    from kvstow.tier.store import TierStore
    from kvstow.tier.writepolicy import WriteMode
    from kvstow_service.replay.launcher import AttachedResult
    from kvstow_service.replay.offload import Offload
    from kvstow_service.replay.pace import ReplayOptions
    from kvstow_service.replay.result import ReplayResult
    from kvstow_service.replay.router import Routing
    from kvstow_service.replay.session import Session
    from kvstow_service.replay.trace import TraceRequest
    from kvstow_service.tiers.tierhost import TierChoice, TierHost

_SLOT_SIZE = "256KiB"
_POOL_SLOTS = 1000
_PATIENCE = 60.0  # seconds


@click.command()
@click.argument("trace")
@click.option("--attach", metavar="unix:PATH", help="Attach to the node service on this socket instead of a pool here.")
@click.option(
    "--engines", type=click.IntRange(1), help="With --attach: engines that replay the trace at once. Default: 1."
)
@click.option(
    "--pool-slots",
    type=int,
    help="Slots of the pool of each rank. Default: 1000; with --attach, what the service has.",
)
@click.option("--slot-size", help="Bytes of one block on each rank. Default: 256KiB.")
@click.option("--shape", help=f"KV cache of a known model instead of a slot size: {', '.join(SHAPES)}.")
@click.option("--device", default="cpu", show_default=True, help="Device that holds the KV cache: cpu, cuda or jax.")
@click.option(
    "--copy-strategy",
    default="auto",
    show_default=True,
    help="On CUDA: direct copies pages, staged copies packed blocks, auto measures which is faster.",
)
@click.option("--requests", type=click.IntRange(1), help="Replay at most this many requests.")
@click.option("--ranks", type=int, default=1, show_default=True, help="Ranks; with --attach, processes of each engine.")
@click.option("--policy", help="Order of eviction: lru or arc. Default: lru; with --attach, the service's.")
@click.option("--rate", type=float, help="Requests started per second. Default: all at once.")
@click.option("--time-scale", type=float, help="Start requests by their timestamps, this many times as fast.")
@click.option("--concurrency", type=int, default=1, show_default=True, help="Requests in flight at once.")
@click.option("--kv-blocks", type=int, help="Blocks of the device's KV cache. Default: what the trace needs.")
@click.option(
    "--tier",
    metavar="URL",
    help="Store under the pools: mooncake://MASTER:PORT, redis://HOST:PORT, or memory: in this process.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Serve the admin API on this port of 127.0.0.1 meanwhile; the next 15 are tried if it is taken.",
)
@click.option("--tier-write", help=f"What goes to the tier: {', '.join(WRITE_MODES)}. Default: through.")
@click.option(
    "--nodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes, each with a pool of its own."
)
@click.option("--routing", help="With --nodes: send a request to the longest prefix, or random. Default: prefix.")
@click.option("--prefill-rate", type=float, help="Tokens per second that each node computes. Default: in no time.")
@click.option("--no-data", is_flag=True, help="Replay the control plane only; move no bytes.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def replay(
    trace: str,
    attach: str | None,
    engines: int | None,
    pool_slots: int | None,
    slot_size: str | None,
    shape: str | None,
    device: str,
    copy_strategy: str,
    requests: int | None,
    ranks: int,
    policy: str | None,
    rate: float | None,
    time_scale: float | None,
    concurrency: int,
    kv_blocks: int | None,
    tier: str | None,
    tier_write: str | None,
    port: int | None,
    nodes: int,
    routing: str | None,
    prefill_rate: float | None,
    no_data: bool,
    as_json: bool,
) -> None:
    """Replay a request trace and verify every loaded byte.

    Each request is looked up, its hits are loaded, the rest is computed and stored. TRACE is a file of JSON lines; -
    reads standard input.

    With --attach each engine is a process, and so is each of its ranks. They go on without the service while it is
    away, and an engine that dies is started again. Engines of equal slot size and ranks share what they store.

    With --tier, blocks that are not in the pool may come from a store that all nodes share. With --nodes, one
    dispatcher sends one request at a time, in the order of the trace, so that hit ratios repeat. With --prefill-rate, a
    fetch has to be faster than computing the same blocks.

    Exit codes: 0 all loaded bytes were correct, 1 some were not, 2 bad input or not enough memory.
    """
    from kvstow.attach.connection import socket_path
    from kvstow.config import EngineConfig
    from kvstow_service.replay.driver import blocks_needed
    from kvstow_service.replay.pace import ReplayOptions
    from kvstow_service.replay.trace import BLOCK_TOKENS, read_trace
    from kvstow_service.tiers.tierhost import TierChoice

    result: ReplayResult | AttachedResult
    try:
        _check_attach(attach, engines, policy, device, no_data=no_data)
        _check_nodes(nodes, routing, concurrency, rate, time_scale)
        _check_port(port, nodes, attach, no_data=no_data)
        _check_tier(tier, tier_write, nodes, attach, device, no_data=no_data)
        cut = _shape(shape, slot_size)
        place = Place(cast(DeviceName, device), cut, cast(CopyStrategy, copy_strategy))  # it checks both
        config = EngineConfig(
            slot_bytes=cut.slot_bytes,
            capacity_slots=_POOL_SLOTS if pool_slots is None else pool_slots,
            num_ranks=ranks,
            policy=policy or "lru",
            block_tokens=BLOCK_TOKENS,
        )
        options = ReplayOptions(concurrency=concurrency, rate=rate, time_scale=time_scale, prefill_rate=prefill_rate)
        settings = _tier_settings(tier_write, prefill_rate)
        choice = None if tier is None else TierChoice.of(tier, settings.write, allows_memory=True)
        path = None if attach is None else _socket(socket_path, attach)
        found = read_trace(trace, limit=requests)
        blocks = kv_blocks or blocks_needed(found, concurrency)
        if nodes > 1:
            way = cast("Routing", routing or "prefix")
            result = _run_fleet(config, nodes, way, choice and choice.store, settings, options, found, blocks, place)
        elif path is None:
            result = _run(config, options, found, blocks, None if no_data else place, choice, settings, port)
        else:
            wanted = 0 if pool_slots is None else pool_slots * cut.slot_bytes * ranks
            result = _run_attached(path, engines or 1, place, cut, ranks, blocks, wanted, found, options)
    except ProcessEndedError as error:
        click.echo(f"kvstow replay: {error}", err=True)
        sys.exit(ExitCode.ERROR)
    except KvstowError as error:
        click.echo(f"kvstow replay: {error}", err=True)
        sys.exit(ExitCode.USAGE)
    _print(result, as_json=as_json)
    if not result.ok:
        sys.exit(ExitCode.ERROR)


def _check_attach(attach: str | None, engines: int | None, policy: str | None, device: str, *, no_data: bool) -> None:
    """Raises `SettingError` for options that contradict --attach, or need it."""
    if attach is None:
        if engines is not None:
            raise SettingError("--engines", engines, "needs --attach: without it there is one engine, in this process")
        return
    if policy is not None:
        raise SettingError(
            "--policy", policy, "cannot be used with --attach: the pool is the service's; see kvstow config"
        )
    if device == "jax":
        raise SettingError("--device", device, "cannot be used with --attach: engines on JAX embed KVStow")
    if no_data:
        raise SettingError("--no-data", True, "cannot be used with --attach: attached ranks move bytes")


def _check_nodes(
    nodes: int, routing: str | None, concurrency: int, rate: float | None, time_scale: float | None
) -> None:
    """Raises `SettingError` for options that contradict --nodes, or need it."""
    if nodes == 1:
        if routing is not None:
            raise SettingError("--routing", routing, "needs --nodes")
        return
    for option, value in (("--rate", rate), ("--time-scale", time_scale)):
        if value is not None:
            raise SettingError(option, value, "cannot be used with --nodes: one request is served at a time")
    if concurrency > 1:
        raise SettingError("--concurrency", concurrency, "cannot be used with --nodes: one request is served at a time")


def _check_port(port: int | None, nodes: int, attach: str | None, *, no_data: bool) -> None:
    """Raises `SettingError` for options that contradict --port."""
    if port is None:
        return
    if attach is not None:
        raise SettingError("--port", port, "cannot be used with --attach: the node service has an admin server")
    if nodes > 1:
        raise SettingError("--port", port, "cannot be used with --nodes: it is for one pool")
    if no_data:
        raise SettingError("--port", port, "cannot be used with --no-data")


def _check_tier(
    tier: str | None, write: str | None, nodes: int, attach: str | None, device: str, *, no_data: bool
) -> None:
    """Raises `SettingError` for options that contradict --tier or --nodes, or need --tier."""
    if tier is None and write is not None:
        raise SettingError("--tier-write", write, "needs --tier")
    option, value = ("--tier", tier) if tier is not None else ("--nodes", nodes if nodes > 1 else None)
    if value is None:
        return
    if attach is not None:
        raise SettingError("--attach", attach, f"cannot be used with {option}: the pool is the service's")
    if no_data:
        raise SettingError("--no-data", True, f"cannot be used with {option}: ranks move bytes")
    if device == "jax":
        raise SettingError("--device", device, f"cannot be used with {option}")


def _tier_settings(write: str | None, prefill_rate: float | None) -> TierSettings:
    """Without a prefill rate every fetch pays and is waited for, so that hit ratios do not depend on the machine."""
    from kvstow.control.fleettier import TierSettings

    mode = cast("WriteMode", write or "through")
    if prefill_rate is None:
        return TierSettings(write=mode, deadline=_PATIENCE, lookup_wait=_PATIENCE)
    return TierSettings(write=mode, prefill_rate=prefill_rate)


def _socket(parse: Callable[[str], Path], attach: str) -> Path:
    try:
        return parse(attach)
    except ConfigError as error:
        raise error.renamed("--attach") from None


def _shape(name: str | None, slot_size: str | None) -> Shape:
    from kvstow.bytesize import parse_size

    if name is not None and slot_size is not None:
        raise ConfigError("--slot-size", slot_size, "--slot-size or --shape, not both")
    return shape_named(name) if name else even_shape(parse_size(slot_size or _SLOT_SIZE, "--slot-size"))


def _run(
    config: EngineConfig,
    options: ReplayOptions,
    requests: list[TraceRequest],
    blocks: int,
    place: Place | None,
    choice: TierChoice | None,
    settings: TierSettings,
    port: int | None,
) -> ReplayResult:
    """`place`: None replays the control plane alone. `port`: None for no admin server."""
    from kvstow_service.replay.driver import ReplayDriver
    from kvstow_service.replay.offload import EmbeddedOffload
    from kvstow_service.replay.replayadmin import replay_admin
    from kvstow_service.replay.session import local_session, simulated_session
    from kvstow_service.replay.tieredoffload import fingerprint_of, tiered_offload

    with StopRequests() as stops, _progress() as progress, ExitStack() as stack:
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
                shared=choice is not None,
            )
        parts = stack.enter_context(session)
        offload: Offload = EmbeddedOffload(parts.engine)
        wait = parts.wait
        tier: TierHost | None = None
        if choice is not None and place is not None:
            name = fingerprint_of(place.shape or even_shape(config.slot_bytes), config.num_ranks)
            stop = stops.requested
            tiered = stack.enter_context(tiered_offload(parts.engine, parts.ranks, choice, settings, name, stop=stop))
            offload, wait, tier = tiered, tiered.wait, tiered.host
        if port is not None:
            stack.enter_context(replay_admin(parts, port, tier))
        progress.start_task(replayed)
        driver = ReplayDriver(
            offload,
            parts.workers,
            parts.kv,
            requests,
            options,
            kv_blocks=blocks,
            on_request=lambda count: progress.update(replayed, completed=count),
            wait=wait,
        )
        return driver.run(stops.requested)


def _run_fleet(
    config: EngineConfig,
    nodes: int,
    routing: Routing,
    store: TierStore | None,
    settings: TierSettings,
    options: ReplayOptions,
    requests: list[TraceRequest],
    blocks: int,
    place: Place,
) -> ReplayResult:
    from kvstow_service.replay.fleet import local_fleet

    with StopRequests() as stops, _progress() as progress:
        pinned = progress.add_task("pinning", total=config.capacity_slots * nodes)
        replayed = progress.add_task("replaying", total=len(requests), start=False)
        with local_fleet(
            config,
            nodes,
            routing,
            store,
            settings,
            options,
            kv_blocks=blocks,
            requests=requests,
            stop=stops.requested,
            place=place,
            on_pinned=lambda slots: progress.update(pinned, completed=slots),
        ) as fleet:
            progress.start_task(replayed)
            return fleet.run(
                requests, stops.requested, on_request=lambda count: progress.update(replayed, completed=count)
            )


def _run_attached(
    path: Path,
    engines: int,
    place: Place,
    shape: Shape,
    ranks: int,
    blocks: int,
    wanted_bytes: int,
    requests: list[TraceRequest],
    options: ReplayOptions,
) -> AttachedResult:
    from kvstow_service.replay.driver import check_fits
    from kvstow_service.replay.enginepipe import EngineSpec
    from kvstow_service.replay.launcher import Launcher

    check_fits(requests, blocks)
    specs = [
        EngineSpec(f"replay-{number}", path, shape, place, ranks, blocks, wanted_bytes, requests, options)
        for number in range(1, engines + 1)
    ]
    with StopRequests() as stops, _progress() as progress:
        replayed = progress.add_task("replaying", total=len(requests) * engines)
        launcher = Launcher(
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


def _print(result: ReplayResult | AttachedResult, *, as_json: bool) -> None:
    from rich.console import Console

    from kvstow_service.replay.launcher import AttachedResult
    from kvstow_service.replay.summary import attached_rows, print_rows, summary_rows

    if as_json:
        click.echo(json.dumps(result.to_json()))
        return
    rows = attached_rows(result) if isinstance(result, AttachedResult) else summary_rows(result)
    print_rows(rows, Console(), title="Replay")
