"""Commands on settings of a running server: resize and config."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvstow.bytesize import format_size
from kvstow_api.numberformat import counted
from kvstow_service.cli.confirmation import Effect, confirm, dry_run_flag, evicted, yes_flag
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.describe import details
from kvstow_service.cli.failures import CommandError, ExitCode
from kvstow_service.cli.following import follow, no_wait_flag, server_wait, started
from kvstow_service.cli.output import Format, emit, format_flag, table
from kvstow_service.cli.poolflag import chosen_pool, pool_flag
from kvstow_service.cli.valuetypes import SIZE

if TYPE_CHECKING:
    from kvstow_api.answers import PlanView, PoolView


@click.command()
@click.argument("size", type=SIZE, required=False)
@click.option("--slots", type=click.IntRange(1), help="Number of slots instead of a size.")
@dry_run_flag
@yes_flag
@no_wait_flag
@format_flag
@pool_flag
@remote
def resize(
    connection: Connection,
    size: int | None,
    slots: int | None,
    dry_run: bool,
    yes: bool,
    no_wait: bool,
    style: Format,
    pool: str | None,
) -> None:
    """Set the pool size of every rank to SIZE bytes, such as 16GiB.

    A larger pool is pinned in the background. A smaller one evicts the coldest blocks.
    """
    from kvstow_api.client import calls

    if (size is None) == (slots is None):
        raise click.UsageError("give a size, or --slots")
    with connection.client() as client:
        name = chosen_pool(client, pool)
        now = client.send(calls.pool(name))
        _check_size(size if size is not None else (slots or 0) * now.slot_bytes, now)
        plan = client.send(calls.plan_resize(slots=slots, num_bytes=size, pool=name))
        if dry_run:
            emit(plan, style, _would_resize)
            return
        words = f"shrink the pool to {counted(plan.capacity_slots, 'slot')} and evict {evicted(plan)},"
        confirm(Effect(words, lost_blocks=plan.evicted_slots), connection, yes)
        change = calls.resize(slots=slots, num_bytes=size, if_match=now.etag, wait=server_wait(no_wait), pool=name)
        answer = follow(client, change, no_wait=no_wait)
        emit(answer, style, partial(_resized, now.capacity_slots, plan.capacity_slots))


def _check_size(size: int, pool: PoolView) -> None:
    """The server refuses it as well, but counts in slots or bytes."""
    if not pool.resizable:
        hint = "the budget of the node (--memory) and the number of pools decide"
        raise CommandError(f"the size of pool {pool.name} is the server's to set", hint, ExitCode.CONFLICT)
    if size > pool.max_capacity_bytes:
        most = f"{format_size(pool.max_capacity_bytes)}, {counted(pool.max_capacity_slots, 'slot')}"
        hint = "ask for less, or restart the engine with a larger max_bytes"
        raise CommandError(f"{format_size(size)} is too much: each rank can hold {most}", hint, ExitCode.USAGE)


def _would_resize(plan: PlanView) -> str:
    return f"would set the capacity to {counted(plan.capacity_slots, 'slot')} and evict {evicted(plan)}"


def _resized(before: int, slots: int, answer: Any) -> str:
    if getattr(answer, "state", "") == "running":
        return started(answer)
    grown = "; ranks pin the new ones in the background" if slots > before else ""
    return f"the pool has {counted(slots, 'slot')}{grown}"


_SETTINGS = ("capacity_slots", "policy", "pinning_paused")
"""Of a pool: those that a `PATCH` changes."""


def _settings_of(pool: PoolView) -> dict[str, Any]:
    return {name: getattr(pool, name) for name in _SETTINGS}


@click.group()
def config() -> None:
    """Show and change the server's settings."""


@config.command()
@format_flag
@pool_flag
@remote
def view(connection: Connection, style: Format, pool: str | None) -> None:
    """Show the settings: those of the pool, which can change now, and those of the start."""
    from kvstow_api.client import calls

    with connection.client() as client:
        startup = client.send(calls.info()).settings
        pools = [one for one in client.send(calls.pools()).items if pool in (None, one.name)]
    found = {"pools": {one.name: _settings_of(one) for one in pools}, "startup": startup}
    emit(found, style, details)


@config.command("set")
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@dry_run_flag
@yes_flag
@no_wait_flag
@format_flag
@pool_flag
@remote
def set_values(
    connection: Connection,
    settings: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    no_wait: bool,
    style: Format,
    pool: str | None,
) -> None:
    """Change settings of the running server: capacity_slots, policy, pinning_paused."""
    from kvstow_api.answers import OperationView
    from kvstow_api.client import calls

    runtime = dict(_parse(setting) for setting in settings)
    with connection.client() as client:
        pool = chosen_pool(client, pool)
        etag = client.send(calls.pool(pool)).etag
        plan = client.send(calls.plan_pool(runtime, pool=pool))
        if dry_run:
            emit(plan, style, details)
            return
        words = f"change {', '.join(runtime)} and evict {evicted(plan)},"
        confirm(Effect(words, lost_blocks=plan.evicted_slots), connection, yes)
        change = calls.change_pool(runtime, if_match=etag, wait=server_wait(no_wait), pool=pool)
        answer = follow(client, change, no_wait=no_wait)
        emit(answer if isinstance(answer, OperationView) else _settings_of(answer), style, details)


@config.command("log-level")
@click.argument("level")
@click.option("--logger", default="kvstow", show_default=True, help="A logger of `kvstow get log-levels`.")
@format_flag
@remote
def log_level(connection: Connection, level: str, logger: str, style: Format) -> None:
    """Set a logger's LEVEL until the server stops: debug, info, warning or error."""
    from kvstow_api.client import calls
    from kvstow_service.cli.tables import LOG_LEVELS

    with connection.client() as client:
        answer = client.send(calls.set_log_level(level, logger=logger))
    emit(answer, style, lambda view: table([view], LOG_LEVELS))


def _parse(setting: str) -> tuple[str, Any]:
    """A value that is not JSON is a string."""
    key, equals, text = setting.partition("=")
    if not key or not equals:
        raise click.UsageError(f"{setting!r} is not KEY=VALUE")
    if key not in _SETTINGS:
        raise click.UsageError(f"there is no setting {key!r}; settings: {', '.join(_SETTINGS)}")
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text
