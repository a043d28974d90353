"""`kvstow replay`: a request trace through an engine of its own, or through engines that attach to a node service."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from kvstow.config import ALLOWED_POLICIES, parse_policy
from kvstow.errors import KvstowError, ProcessEndedError
from kvstow_service.cli.failures import ExitCode
from kvstow_service.cli.replayoptions import (
    attach_path,
    check_attach,
    check_port,
    shape_of,
)
from kvstow_service.cli.replayruns import run_attached, run_here
from kvstow_service.replay.shapes import SHAPES

if TYPE_CHECKING:
    from kvstow_service.replay.launcher import AttachedResult
    from kvstow_service.replay.result import ReplayResult

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
    from kvstow_service.replay.driver import blocks_needed
    from kvstow_service.replay.pace import ReplayOptions
    from kvstow_service.replay.trace import BLOCK_TOKENS, read_trace

    result: ReplayResult | AttachedResult
    try:
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
