"""Commands that switch parts of the server off and on: drain, undrain, bypass, pinning."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvstow_api.numberformat import counted, duration
from kvstow_api.switches import bypass_words, bypassed, drain_words
from kvstow_service.cli.confirmation import Effect, confirm, dry_run_flag, yes_flag
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.output import Format, emit, format_flag
from kvstow_service.cli.poolflag import chosen_pool, pool_flag
from kvstow_service.cli.valuetypes import TIME

if TYPE_CHECKING:
    from kvstow.status import BypassStatus, DrainStatus

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
@click.option("--deadline", type=TIME, help="Shown to those who wait for the drain. Nothing is aborted when it passes.")
@dry_run_flag
@yes_flag
@format_flag
@switch_pool_flag
@remote
def drain(
    connection: Connection,
    mode: str,
    deadline: float | None,
    dry_run: bool,
    yes: bool,
    style: Format,
    pool: str | None,
) -> None:
    """Finish what is in flight, and accept nothing new.

    Requests are still served, without the cache. /readyz fails until `kvstow undrain`; `kvstow wait --for=drained`
    waits until nothing is in flight.
    """
    from kvstow_api.client import routes

    wanted: Any = mode.replace("-", "_")
    with connection.client() as client:
        if dry_run:
            emit(client.call(routes.get_drain, pool=pool), style, partial(_would_drain, mode))
            return
        words = _DRAINS[mode] if pool is None else f"{_POOL_DRAINS[mode]} in pool {pool},"
        confirm(Effect(words, fails_readyz=pool is None), connection, yes)
        now = client.call(routes.start_drain, {"mode": wanted, "deadline_seconds": deadline}, pool=pool)
        emit(now, style, drain_words)


@click.command()
@dry_run_flag
@format_flag
@switch_pool_flag
@remote
def undrain(connection: Connection, dry_run: bool, style: Format, pool: str | None) -> None:
    """Accept traffic again."""
    from kvstow_api.client import routes

    with connection.client() as client:
        if dry_run:
            emit(client.call(routes.get_drain, pool=pool), style, _would_undrain)
            return
        was_active = client.call(routes.get_drain, pool=pool).active
        now = client.call(routes.end_drain, pool=pool)
        emit(now, style, drain_words if was_active else lambda _: "nothing to do: there was no drain")


def _would_drain(mode: str, now: DrainStatus) -> str:
    left = f"{counted(now.pending_transfers, 'transfer')} and {counted(now.leases, 'lease')}"
    return f"would {_DRAINS[mode].rstrip(',')}; in flight: {left}"


def _would_undrain(now: DrainStatus) -> str:
    return "would end the drain" if now.active else "would change nothing: there is no drain"


@click.command()
@click.option("--load", is_flag=True, help="Switch loads off: every lookup is a miss.")
@click.option("--store", is_flag=True, help="Switch stores off.")
@click.option("--off", is_flag=True, help="End the bypass: switch loads and stores on.")
@click.option("--ttl", type=TIME, help="For this long; otherwise until --off.")
@dry_run_flag
@format_flag
@switch_pool_flag
@remote
def bypass(
    connection: Connection,
    load: bool,
    store: bool,
    off: bool,
    ttl: float | None,
    dry_run: bool,
    style: Format,
    pool: str | None,
) -> None:
    """Switch loads or stores off without touching the pool.

    Replaces any earlier bypass.
    """
    from kvstow.status import BypassStatus
    from kvstow_api.client import routes

    if off == (load or store) or (off and ttl is not None):
        raise click.UsageError("give --load, --store or both, with or without --ttl; or --off alone")
    if dry_run:
        emit(BypassStatus(load=load, store=store, ttl_seconds_left=ttl), style, _would_bypass)
        return
    with connection.client() as client:
        before = client.call(routes.get_bypass, pool=pool)
        now = client.call(routes.set_bypass, {"load": load, "store": store, "ttl_seconds": ttl}, pool=pool)
        is_nothing = off and not bypassed(before)
        emit(now, style, (lambda _: "nothing to do: there was no bypass") if is_nothing else bypass_words)


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
def pause(connection: Connection, pool: str | None) -> None:
    """Pin no further chunk of memory. What is pinned stays usable."""
    from kvstow_api.client import routes

    with connection.client() as client:
        client.call(routes.change_pool, {"pinning_paused": True}, pool=chosen_pool(client, pool))
    click.echo("pinning is paused")


@pinning.command()
@pool_flag
@remote
def resume(connection: Connection, pool: str | None) -> None:
    """Continue a paused pinning."""
    from kvstow_api.client import routes

    with connection.client() as client:
        client.call(routes.change_pool, {"pinning_paused": False}, pool=chosen_pool(client, pool))
    click.echo("pinning continues")


@pinning.command()
@pool_flag
@remote
def retry(connection: Connection, pool: str | None) -> None:
    """Let ranks whose pinning failed try again."""
    from kvstow_api.client import routes

    with connection.client() as client:
        attempt = client.call(routes.retry, pool=chosen_pool(client, pool)).pin_attempt
    click.echo(f"ranks try again: attempt {attempt}")
