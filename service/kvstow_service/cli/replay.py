"""`kvstow replay`: runs a request trace through engines that attach to a node service, or through control planes of
several sizes and policies that move no bytes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kvstow.bytesize import format_size, parse_size
from kvstow.config import ALLOWED_POLICIES, parse_policy
from kvstow.errors import ConfigError, KvstowError, ProcessEndedError, SettingError
from kvstow_api.texts import count, percent
from kvstow_service.cli.failures import ExitCode
from kvstow_service.cli.output import table
from kvstow_service.cli.progress import ProgressBars
from kvstow_service.process.stop import StopRequests
from kvstow_service.replay.trace import (
    SHAPES,
    ReplayOptions,
    Shape,
    TraceRequest,
    even_shape,
    read_trace,
    shape_named,
)

if TYPE_CHECKING:
    from kvstow_service.replay.hittable import HitTable
    from kvstow_service.replay.result import AttachedResult, ReplayResult

_POOL_SLOTS = 1000
_SLOT_SIZE = "256KiB"
_POSITIVE = click.FloatRange(0, min_open=True)


@click.command()
@click.argument("trace")
@click.option("--attach", metavar="unix:PATH", help="Attach to the node service on this socket, and move bytes.")
@click.option(
    "--engines", type=click.IntRange(1), help="With --attach: engines that replay the trace at once. Default: 1."
)
@click.option(
    "--pool-slots",
    type=click.IntRange(1),
    help=f"Slots of the pool of each rank. Default: {_POOL_SLOTS}; with --attach, what the service has.",
)
@click.option("--slot-size", help=f"Bytes of one block on each rank. Default: {_SLOT_SIZE}.")
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
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Requests that load, compute or store at once. Those that only generate do not count.",
)
@click.option("--kv-blocks", type=click.IntRange(1), help="Blocks of the KV cache. Default: what the trace needs.")
@click.option("--prefill-rate", type=_POSITIVE, help="Tokens per second that an engine computes. Default: no limit.")
@click.option(
    "--sizes",
    metavar="SIZE,...",
    help="Without --attach: replay with each policy at each of these sizes, in slots or in bytes of all ranks (64GiB). "
    "Prints a table.",
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
    prefill_rate: float | None,
    sizes: str | None,
    as_json: bool,
) -> None:
    """Replay a request trace, and say what would hit, or move every byte and verify it.

    TRACE is a file of JSON lines, which may be compressed with gzip; - reads standard input. Without --attach only a
    control plane runs, in the time of the trace, and says what would hit; --sizes compares sizes and policies.

    With --attach each engine is a process, and so is each of its ranks. Each request is looked up, its hits are loaded
    and verified, the rest is computed and stored. Then it runs until the trace says that it has ended. The processes
    continue without the service while it is away, and an engine that dies is started again. Engines of equal slot size
    and ranks share what they store.

    If the service has a fleet tier, blocks may come from it; with --prefill-rate, a fetch has to be faster than
    computing the same blocks.

    Exit codes: 0 all loaded bytes were correct, 1 some were not, 2 bad input or not enough memory.
    """
    try:
        given = {
            "--attach": attach,
            "--engines": engines,
            "--policy": policies[0] if policies else None,
            "--pool-slots": pool_slots,
            "--rate": rate,
            "--time-scale": time_scale,
            "--prefill-rate": prefill_rate,
            "--kv-blocks": kv_blocks,
            "--sizes": sizes,
        }
        _refuse_conflicts({name: value for name, value in given.items() if value is not None})
        cut = _shape_of(shape, slot_size)
        socket = None if attach is None else _attach_path(attach)
        found = read_trace(trace, limit=requests)
        if sizes is not None:
            names, slot_bytes = _parse_policies(policies or ("auto", "lru")), cut.slot_bytes * ranks
            _show_table(_hits(found, _parse_sizes(sizes, slot_bytes), names, slot_bytes), as_json=as_json)
            return
        slots, policy = pool_slots or _POOL_SLOTS, _the_policy(policies)
        if socket is None:
            result: ReplayResult | AttachedResult = _run_without_bytes(found, slots, policy, cut.slot_bytes, ranks)
        else:
            from kvstow_service.replay.driver import blocks_needed, check_fits

            options = ReplayOptions(
                concurrency=concurrency, rate=rate, time_scale=time_scale, prefill_rate=prefill_rate
            )
            blocks = kv_blocks or blocks_needed(found, concurrency)
            check_fits(found, blocks)
            wanted = (pool_slots or 0) * cut.slot_bytes * ranks
            result = _run_attached(socket, engines or 1, cut, ranks, blocks, wanted, found, options)
    except KvstowError as error:
        click.echo(f"kvstow replay: {error}", err=True)
        sys.exit(ExitCode.ERROR if isinstance(error, ProcessEndedError) else ExitCode.USAGE)
    _show(result, as_json=as_json)


class _Conflict(NamedTuple):
    """An option that needs another option, or that cannot be used with it."""

    option: str
    other: str
    is_needed: bool
    problem: str


_CONFLICTS = (
    _Conflict("--policy", "--attach", False, "cannot be used with --attach: the pool is the service's"),
    _Conflict("--sizes", "--attach", False, "cannot be used with --attach: the pool is the service's"),
    _Conflict("--pool-slots", "--sizes", False, "cannot be used here: --sizes has the sizes"),
    *(
        _Conflict(option, "--attach", True, "needs --attach: without it no engine runs and no bytes move")
        for option in ("--engines", "--rate", "--time-scale", "--prefill-rate", "--kv-blocks")
    ),
)


def _refuse_conflicts(given: Mapping[str, object]) -> None:
    """Raise `SettingError` for the first given option that does not fit the others."""
    for rule in _CONFLICTS:
        if rule.option in given and (rule.other in given) is not rule.is_needed:
            raise SettingError(rule.option, given[rule.option], rule.problem)


def _show(result: ReplayResult | AttachedResult, *, as_json: bool) -> None:
    """Print the result, and exit with an error if a loaded byte was wrong."""
    from rich.console import Console

    from kvstow_service.replay.result import print_rows

    if as_json:
        click.echo(json.dumps(result.to_json()))
    else:
        print_rows(result.rows(), Console(), title="Replay")
    if not result.ok:
        sys.exit(ExitCode.ERROR)


def _shape_of(name: str | None, slot_size: str | None) -> Shape:
    if name is not None and slot_size is not None:
        raise ConfigError("--slot-size", slot_size, "--slot-size or --shape, not both")
    return shape_named(name) if name else even_shape(parse_size(slot_size or _SLOT_SIZE, "--slot-size"))


def _attach_path(attach: str) -> Path:
    from kvstow.attach.connection import socket_path

    try:
        return socket_path(attach)
    except ConfigError as error:
        raise error.renamed("--attach") from None


def _hits(requests: list[TraceRequest], slots: Sequence[int], policies: Sequence[str], slot_bytes: int) -> HitTable:
    from kvstow_service.replay.hittable import hit_table

    with ProgressBars() as bars:
        replayed = bars.bar("replaying", len(requests) * len(slots) * len(policies))
        return hit_table(requests, slots, policies, slot_bytes, replayed)


def _show_table(found: HitTable, *, as_json: bool) -> None:
    from kvstow_service.cli.tables import Column, Columns

    view = found.to_json()
    if as_json:
        click.echo(json.dumps(view))
        return
    columns = Columns[dict[str, Any]](
        "slots",
        Column("slots", lambda size: count(size["slots"])),
        Column("size", lambda size: format_size(size["bytes"])),
        *(Column(policy, partial(_hit_share, policy)) for policy in found.hits),
    )
    click.echo(table(view["sizes"], columns))
    click.echo(
        f"\n{found.requests:,} requests looked up {found.blocks:,} blocks; without evictions, "
        f"{percent(found.everything)} of them would hit"
    )


def _hit_share(policy: str, size: Mapping[str, Any]) -> str:
    return percent(size["ratios"][policy])


def _parse_sizes(text: str, slot_bytes: int) -> list[int]:
    """Parse sizes, and return them as numbers of slots, the smallest first. A number without a unit is one of slots. A
    size with a unit is in bytes on all ranks, and `slot_bytes` are the bytes of a slot on all ranks. Raises
    `ConfigError`."""
    found = set()
    for part in filter(None, (one.strip() for one in text.split(","))):
        slots = int(part) if part.isdecimal() else parse_size(part, "--sizes") // slot_bytes
        if slots < 1:
            raise ConfigError("--sizes", part, f"1 slot or more; a slot has {slot_bytes} bytes on all ranks")
        found.add(slots)
    if not found:
        raise ConfigError("--sizes", text, "slots, or bytes with a unit, separated by commas: 1000,64GiB")
    return sorted(found)


def _parse_policies(names: Sequence[str]) -> list[str]:
    from kvstow_service.replay.hittable import FORESIGHT

    try:
        return [name if name == FORESIGHT else parse_policy(name) for name in names]
    except ConfigError as error:
        raise ConfigError("--policy", error.value, f"{ALLOWED_POLICIES}; or {FORESIGHT}, with foresight") from None


def _the_policy(names: Sequence[str]) -> str:
    if len(names) > 1:
        raise SettingError("--policy", names[1], "needs --sizes: only a table compares several policies")
    (policy,) = _parse_policies(names or ("auto",))
    return policy


def _run_without_bytes(
    requests: list[TraceRequest], slots: int, policy: str, slot_bytes: int, ranks: int
) -> ReplayResult:
    from kvstow_service.replay.result import ReplayResult

    began = time.perf_counter()
    found = _hits(requests, [slots], [policy], slot_bytes * ranks)
    return ReplayResult(
        requests=found.requests,
        blocks=found.blocks,
        hit_blocks=found.hits[policy][0],
        seconds=time.perf_counter() - began,
        ranks=ranks,
        slots=slots,
        policy=policy,
    )


def _run_attached(
    socket: Path,
    engines: int,
    cut: Shape,
    ranks: int,
    blocks: int,
    wanted_bytes: int,
    requests: list[TraceRequest],
    options: ReplayOptions,
) -> AttachedResult:
    from kvstow_service.replay.launcher import EngineLauncher, EngineSpec

    specs = [
        EngineSpec(f"replay-{number}", socket, cut, ranks, blocks, wanted_bytes, requests, options)
        for number in range(1, engines + 1)
    ]

    def say(line: str) -> None:
        click.echo(f"kvstow replay: {line}", err=True)

    with StopRequests() as stops, ProgressBars() as bars:
        replayed = bars.bar("replaying", sum(len(spec.requests) for spec in specs))
        result = EngineLauncher(specs, on_request=replayed, log=say).run(stops.requested)
    for engine in result.engines:
        if engine.problem is not None:
            say(f"{engine.name} was not attached at its end: {engine.problem}")
    return result
