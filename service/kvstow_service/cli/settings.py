"""Commands that change a running server: its settings, what is switched off, its engines and its pools."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvstow_api.texts import bypass_words, bypassed, counted, drain_words, duration
from kvstow_service.cli.blocks import follow, no_wait_flag, started
from kvstow_service.cli.connection import (
    SIZE,
    TIME,
    Invocation,
    chosen_pool,
    dry_run_flag,
    evicted,
    find_session,
    in_store,
    pool_flag,
    remote,
    yes_flag,
)
from kvstow_service.cli.failures import CommandError, ExitCode
from kvstow_service.cli.get import details
from kvstow_service.cli.output import format_flag, table

if TYPE_CHECKING:
    from kvstow.status import BypassStatus, DrainStatus, SessionStatus
    from kvstow_api.answers import DetachView, PlanView, PoolView

# -- resize and config ------------------------------------------------------------------------------------------------


@click.command()
@click.argument("size", type=SIZE, required=False)
@click.option("--slots", type=click.IntRange(1), help="Number of slots instead of a size.")
@dry_run_flag
@yes_flag
@no_wait_flag
@format_flag
@pool_flag
@remote
def resize(call: Invocation, size: int | None, slots: int | None) -> None:
    """Set the pool size of every rank to SIZE bytes, such as 16GiB.

    A larger pool is pinned in the background. A smaller one evicts the coldest blocks.
    """
    if (size is None) == (slots is None):
        raise click.UsageError("give a size, or --slots")
    wanted = {"capacity_slots": slots} if size is None else {"capacity_bytes": size}

    def would(plan: PlanView) -> str:
        return f"would set the capacity to {counted(plan.capacity_slots, 'slot')} and evict {evicted(plan)}"

    _change(call, wanted, "shrink the pool", would, _resized)


def _change(
    call: Invocation,
    wanted: dict[str, Any],
    words: str,
    would: Callable[[PlanView], str],
    changed: Callable[[PoolView, PlanView, Any], tuple[Any, Callable[[Any], str]]],
) -> None:
    """Change settings of a pool. `words` begin the question, and `would` makes the text of a dry run. `changed` gets
    the pool before the change, the plan and the answer, and returns what is printed."""
    from kvstow_api.answers import PlanView
    from kvstow_api.client import routes

    with call.client() as client:
        name = chosen_pool(client, call.pool)
        before = client.call(routes.get_pool, pool=name)
        plan = client.call(routes.change_pool.returning(PlanView), {**wanted, "dry_run": True}, pool=name)
        if call.dry_run:
            call.emit(plan, would)
            return
        call.confirm(f"{words} and evict {evicted(plan)},", destructive=plan.evicted_slots > 0)
        answer = follow(client, routes.change_pool, wanted, pool=name, if_match=before.etag, no_wait=call.no_wait)
        call.emit(*changed(before, plan, answer))


def _resized(before: PoolView, plan: PlanView, answer: Any) -> tuple[Any, Callable[[Any], str]]:
    grown = "; ranks pin the new ones in the background" if plan.capacity_slots > before.capacity_slots else ""
    words = f"the pool has {counted(plan.capacity_slots, 'slot')}{grown}"
    return answer, started if getattr(answer, "state", "") == "running" else lambda _: words


_SETTINGS = ("capacity_slots", "policy", "pinning_paused")
"""The settings of a pool that a `PATCH` changes."""


def _settings_of(pool: PoolView) -> dict[str, Any]:
    return {name: getattr(pool, name) for name in _SETTINGS}


@click.group()
def config() -> None:
    """Show and change the server's settings."""


@config.command()
@format_flag
@pool_flag
@remote
def view(call: Invocation) -> None:
    """Show the settings: those of the pool, which can change now, and those of the start."""
    from kvstow_api.client import routes

    with call.client() as client:
        startup = client.call(routes.get_info).settings
        pools = [one for one in client.call(routes.list_pools).items if call.pool in (None, one.name)]
    found = {"pools": {one.name: _settings_of(one) for one in pools}, "startup": startup}
    call.emit(found, details)


@config.command("set")
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@dry_run_flag
@yes_flag
@no_wait_flag
@format_flag
@pool_flag
@remote
def set_values(call: Invocation, settings: tuple[str, ...]) -> None:
    """Change settings of the running server: capacity_slots, policy, pinning_paused."""
    wanted = dict(_parse(setting) for setting in settings)
    _change(call, wanted, f"change {', '.join(wanted)}", details, _settings_after)


def _settings_after(before: PoolView, plan: PlanView, answer: Any) -> tuple[Any, Callable[[Any], str]]:
    from kvstow_api.answers import OperationView

    return answer if isinstance(answer, OperationView) else _settings_of(answer), details


@config.command("log-level")
@click.argument("level")
@click.option("--logger", default="kvstow", show_default=True, help="A logger of `kvstow get log-levels`.")
@format_flag
@remote
def log_level(call: Invocation, level: str, logger: str) -> None:
    """Set a logger's LEVEL until the server stops: debug, info, warning or error."""
    from kvstow_api.client import routes
    from kvstow_service.cli.tables import LOG_LEVELS

    with call.client() as client:
        answer = client.call(routes.set_log_level, {"logger": logger, "level": level})
    call.emit(answer, lambda view: table([view], LOG_LEVELS))


def _parse(setting: str) -> tuple[str, Any]:
    """Parse a setting. A value that is not JSON becomes a string, as does a number that JSON cannot carry. The server
    refuses such a string."""
    key, equals, text = setting.partition("=")
    if not key or not equals:
        raise click.UsageError(f"{setting!r} is not KEY=VALUE")
    if key not in _SETTINGS:
        raise click.UsageError(f"there is no setting {key!r}; settings: {', '.join(_SETTINGS)}")
    try:
        value = json.loads(text)
    except ValueError:
        return key, text
    return key, text if isinstance(value, float) and not math.isfinite(value) else value


# -- drain, bypass, pinning -------------------------------------------------------------------------------------------


_DRAINS = {
    "all": "stop loads and stores, and make /readyz fail,",
    "stop-stores": "stop stores, and make /readyz fail,",
}
_POOL_DRAINS = {"all": "stop loads and stores", "stop-stores": "stop stores"}

switch_pool_flag = click.option("--pool", metavar="NAME", help="Only this pool. Default: all, and pools made later.")


@click.command()
@click.option(
    "--mode",
    type=click.Choice(list(_DRAINS)),
    default="all",
    show_default=True,
    help="all: no loads and no stores; stop-stores: no stores.",
)
@click.option(
    "--deadline", type=TIME, help="Shown by commands that wait for the drain. Nothing is aborted when it passes."
)
@dry_run_flag
@yes_flag
@format_flag
@switch_pool_flag
@remote
def drain(call: Invocation, mode: str, deadline: float | None) -> None:
    """Finish what is in flight, and accept nothing new.

    Requests are still served, without the cache. /readyz fails until `kvstow undrain`; `kvstow wait --for=drained`
    waits until nothing is in flight.
    """
    from kvstow_api.client import routes

    wanted = {"mode": mode.replace("-", "_"), "deadline_seconds": deadline}
    with call.client() as client:
        if call.dry_run:
            call.emit(client.call(routes.get_drain, pool=call.pool), partial(_would_drain, mode))
            return
        words = _DRAINS[mode] if call.pool is None else f"{_POOL_DRAINS[mode]} in pool {call.pool},"
        call.confirm(words, destructive=call.pool is None)
        call.emit(client.call(routes.start_drain, wanted, pool=call.pool), drain_words)


@click.command()
@dry_run_flag
@format_flag
@switch_pool_flag
@remote
def undrain(call: Invocation) -> None:
    """Accept traffic again."""
    from kvstow_api.client import routes

    with call.client() as client:
        before = client.call(routes.get_drain, pool=call.pool)
        if call.dry_run:
            would = "would end the drain" if before.active else "would change nothing: there is no drain"
            call.emit(before, lambda _: would)
            return
        now = client.call(routes.end_drain, pool=call.pool)
        call.emit(now, drain_words if before.active else lambda _: "nothing to do: there was no drain")


def _would_drain(mode: str, now: DrainStatus) -> str:
    left = f"{counted(now.pending_transfers, 'transfer')} and {counted(now.leases, 'lease')}"
    return f"would {_DRAINS[mode].rstrip(',')}; in flight: {left}"


@click.command()
@click.option("--load", is_flag=True, help="Switch loads off: every lookup is a miss.")
@click.option("--store", is_flag=True, help="Switch stores off.")
@click.option("--off", is_flag=True, help="End the bypass: switch loads and stores on.")
@click.option("--ttl", type=TIME, help="How long the bypass lasts. Default: until --off.")
@dry_run_flag
@format_flag
@switch_pool_flag
@remote
def bypass(call: Invocation, load: bool, store: bool, off: bool, ttl: float | None) -> None:
    """Switch loads or stores off without touching the pool.

    Replaces any earlier bypass.
    """
    from kvstow.status import BypassStatus
    from kvstow_api.client import routes

    if off == (load or store) or (off and ttl is not None):
        raise click.UsageError("give --load, --store or both, with or without --ttl; or --off alone")
    if call.dry_run:
        call.emit(BypassStatus(load=load, store=store, ttl_seconds_left=ttl), _would_bypass)
        return
    with call.client() as client:
        before = client.call(routes.get_bypass, pool=call.pool)
        now = client.call(routes.set_bypass, {"load": load, "store": store, "ttl_seconds": ttl}, pool=call.pool)
        is_nothing = off and not bypassed(before)
        call.emit(now, (lambda _: "nothing to do: there was no bypass") if is_nothing else bypass_words)


def _would_bypass(plan: BypassStatus) -> str:
    if not (off := bypassed(plan)):
        return "would switch loads and stores on"
    ends = "" if plan.ttl_seconds_left is None else f" for {duration(plan.ttl_seconds_left)}"
    return f"would switch {' and '.join(off)} off{ends}"


@click.group()
def pinning() -> None:
    """Pause, resume or retry the pinning of memory."""


@pinning.command()
@pool_flag
@remote
def pause(call: Invocation) -> None:
    """Pin no further chunk of memory. What is pinned stays usable."""
    _set_paused(call, paused=True)
    click.echo("pinning is paused")


@pinning.command()
@pool_flag
@remote
def resume(call: Invocation) -> None:
    """Continue a paused pinning."""
    _set_paused(call, paused=False)
    click.echo("pinning continues")


def _set_paused(call: Invocation, *, paused: bool) -> None:
    from kvstow_api.client import routes

    with call.client() as client:
        client.call(routes.change_pool, {"pinning_paused": paused}, pool=chosen_pool(client, call.pool))


@pinning.command()
@pool_flag
@remote
def retry(call: Invocation) -> None:
    """Let ranks whose pinning failed try again."""
    from kvstow_api.client import routes

    with call.client() as client:
        attempt = client.call(routes.retry, pool=chosen_pool(client, call.pool)).pin_attempt
    click.echo(f"ranks try again: attempt {attempt}")


# -- engines and pools of a node --------------------------------------------------------------------------------------


@click.command()
@click.argument("session_id", metavar="SESSION")
@click.option("--kill", is_flag=True, help="Kill its processes, too.")
@dry_run_flag
@yes_flag
@format_flag
@remote
def detach(call: Invocation, session_id: str, kill: bool) -> None:
    """Detach an engine from the node.

    Its connections end at once, and it serves without the cache until it attaches again. What it holds is freed when
    its processes have ended, and not before, because until then they may still copy: --kill ends them. SESSION is an id
    of `kvstow get sessions`.
    """
    from kvstow_api.client import routes

    with call.client() as client:
        session = find_session(client, session_id)
        if call.dry_run:
            call.emit(session, partial(_would_detach, kill))
            return
        call.confirm(f"{_detach_words(session, kill)},", destructive=True)
        call.emit(client.call(routes.detach_session, session_id=session_id, kill=kill), _detached)


def _detach_words(session: SessionStatus, kill: bool) -> str:
    name = f"session {session.id} ({session.engine}, pool {session.pool})"
    return f"detach {name}" + (" and kill its processes" if kill else "")


def _would_detach(kill: bool, session: SessionStatus) -> str:
    held = session.leased_slots + session.quarantined_slots
    return (
        f"would {_detach_words(session, kill)}; it has {counted(session.in_flight, 'transfer')} in flight and holds "
        + (f"{counted(held, 'slot')}")
    )


def _detached(view: DetachView) -> str:
    how = "its processes are killed" if view.killed else "its processes were left alone"
    return f"session {view.id} is detached, and {how}; it is gone from `kvstow get sessions` when they have ended"


@click.group()
def delete() -> None:
    """Delete a pool that no engine uses."""


@delete.command()
@click.argument("name")
@dry_run_flag
@yes_flag
@format_flag
@remote
def pool(call: Invocation, name: str) -> None:
    """Delete a pool with all its blocks.

    Its memory is for other pools as soon as no process can reach it. Exit code 5 while sessions use the pool.
    """
    from kvstow_api.client import routes

    with call.client() as client:
        now = client.call(routes.get_pool, pool=name)
        if now.sessions:
            uses = f"{counted(now.sessions, 'session')} {'uses' if now.sessions == 1 else 'use'}"
            raise CommandError(
                f"{uses} pool {name}", "`kvstow get sessions` lists them; detach them first", ExitCode.CONFLICT
            )
        if call.dry_run:
            call.emit(now, lambda view: f"would delete pool {name} and {_blocks(view)}")
            return
        call.confirm(f"delete pool {name} and {_blocks(now)},", destructive=True)
        deleted = client.call(routes.delete_pool, pool=name)
    call.emit(deleted, lambda view: f"deleted pool {name}{in_store(view)}")


def _blocks(pool: PoolView) -> str:
    return counted(pool.slots.cached + pool.slots.leased, "block")
