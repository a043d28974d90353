"""`kvstow replay`: a request trace through an engine in this process, or through engines that attach to a node
service."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstow.config import ALLOWED_POLICIES, parse_policy
from kvstow.errors import ConfigError, KvstowError, ProcessEndedError, SettingError
from kvstow_service.cli.failures import ExitCode
from kvstow_service.cli.trace import Bar, json_flag, progress, requests_flag, shape_flag, shape_of, slot_size_flag
from kvstow_service.process.stop import StopRequests
from kvstow_service.replay.trace import BLOCK_TOKENS, ReplayOptions, Shape, TraceRequest, read_trace

if TYPE_CHECKING:
    from kvstow.config import EngineConfig
    from kvstow_service.replay.launcher import EngineSpec
    from kvstow_service.replay.result import AttachedResult, ReplayResult

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
    help=f"Slots of the pool of each rank. Default: {_POOL_SLOTS}; with --attach, what the service has.",
)
@slot_size_flag
@shape_flag
@requests_flag
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
@click.option("--prefill-rate", type=_POSITIVE, help="Tokens per second that an engine computes. Default: no limit.")
@json_flag
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
    prefill_rate: float | None,
    as_json: bool,
) -> None:
    """Replay a request trace and verify every loaded byte.

    Each request is looked up, its hits are loaded, the rest is computed and stored. TRACE is a file of JSON lines; -
    reads standard input.

    With --attach each engine is a process, and so is each of its ranks. They continue without the service while it is
    away, and an engine that dies is started again. Engines of equal slot size and ranks share what they store.

    If the service has a fleet tier, blocks may come from it; with --prefill-rate, a fetch has to be faster than
    computing the same blocks.

    `kvstow trace hits` shows what would hit in pools of other sizes, without moving any bytes.

    Exit codes: 0 all loaded bytes were correct, 1 some were not, 2 bad input or not enough memory.
    """
    from rich.console import Console

    from kvstow.config import EngineConfig
    from kvstow_service.replay.driver import blocks_needed, check_fits
    from kvstow_service.replay.launcher import EngineSpec
    from kvstow_service.replay.result import print_rows

    result: ReplayResult | AttachedResult
    try:
        cut = shape_of(shape, slot_size)
        if engines is not None and attach is None:
            raise SettingError("--engines", engines, "needs --attach: without it there is one engine, in this process")
        if policy is not None and attach is not None:
            raise SettingError("--policy", policy, "cannot be used with --attach: the pool is the service's")
        options = ReplayOptions(concurrency=concurrency, rate=rate, time_scale=time_scale, prefill_rate=prefill_rate)
        config = EngineConfig(
            slot_bytes=cut.slot_bytes,
            capacity_slots=pool_slots or _POOL_SLOTS,
            num_ranks=ranks,
            policy=parse_policy(policy or "auto"),
            block_tokens=BLOCK_TOKENS,
        )
        path = None if attach is None else _attach_path(attach)
        found = read_trace(trace, limit=requests)
        blocks = kv_blocks or blocks_needed(found, concurrency)
        check_fits(found, blocks)
        if path is None:
            result = _run_here(config, options, found, blocks, cut)
        else:
            wanted = (pool_slots or 0) * cut.slot_bytes * ranks
            names = [f"replay-{number}" for number in range(1, (engines or 1) + 1)]
            result = _run_attached([EngineSpec(one, path, cut, ranks, blocks, wanted, found, options) for one in names])
    except KvstowError as error:
        click.echo(f"kvstow replay: {error}", err=True)
        sys.exit(ExitCode.ERROR if isinstance(error, ProcessEndedError) else ExitCode.USAGE)
    if as_json:
        click.echo(json.dumps(result.to_json()))
    else:
        print_rows(result.rows(), Console(), title="Replay")
    if not result.ok:
        sys.exit(ExitCode.ERROR)


def _attach_path(attach: str) -> Path:
    from kvstow.attach.connection import socket_path

    try:
        return socket_path(attach)
    except ConfigError as error:
        raise error.renamed("--attach") from None


def _run_here(
    config: EngineConfig, options: ReplayOptions, requests: list[TraceRequest], blocks: int, shape: Shape
) -> ReplayResult:
    from kvstow_service.replay.driver import ReplayDriver
    from kvstow_service.replay.offload import EmbeddedOffload
    from kvstow_service.replay.ranks import local_session

    with StopRequests() as stops, progress() as bars:
        pinned = Bar(bars, "pinning", config.capacity_slots)
        with local_session(config, kv_blocks=blocks, shape=shape, stop=stops.requested, on_pinned=pinned) as session:
            driver = ReplayDriver(
                EmbeddedOffload(session.engine),
                session.workers,
                session.kv,
                requests,
                options,
                kv_blocks=blocks,
                on_request=Bar(bars, "replaying", len(requests)),
            )
            return driver.run(stops.requested)


def _run_attached(specs: Sequence[EngineSpec]) -> AttachedResult:
    from kvstow_service.replay.launcher import EngineLauncher

    def say(line: str) -> None:
        click.echo(f"kvstow replay: {line}", err=True)

    with StopRequests() as stops, progress() as bars:
        replayed = Bar(bars, "replaying", sum(len(spec.requests) for spec in specs))
        result = EngineLauncher(specs, on_request=replayed, log=say).run(stops.requested)
    for engine in result.engines:
        if engine.problem is not None:
            say(f"{engine.name} was not attached at its end: {engine.problem}")
    return result
