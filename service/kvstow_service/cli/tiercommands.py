"""`kvstow tier`: the store of the fleet tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvstow.tier.writepolicy import WRITE_MODES
from kvstow_api.numberformat import counted, duration
from kvstow_service.cli.confirmation import Effect, confirm, dry_run_flag, yes_flag
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.following import follow, no_wait_flag, server_wait, started
from kvstow_service.cli.output import Format, emit, format_flag
from kvstow_service.cli.poolflag import chosen_pool, pool_flag
from kvstow_service.cli.switches import switch_pool_flag
from kvstow_service.cli.valuetypes import TIME

if TYPE_CHECKING:
    from kvstow.tier.writepolicy import WriteMode
    from kvstow_api.views.operations import OperationView
    from kvstow_api.views.tier import TierBypassView, TierPurgedView, TierView


@click.group()
def tier() -> None:
    """Attach, detach, bypass or purge the store that nodes share.

    `kvstow get tier` shows what goes to it and comes from it, and why.
    """


@tier.command()
@click.argument("url")
@click.option("--write", type=click.Choice(WRITE_MODES), help="Which blocks go to the store. Default: auto.")
@format_flag
@remote
def attach(connection: Connection, url: str, write: WriteMode | None, style: Format) -> None:
    """Use the store at URL, such as mooncake://10.0.4.2:50051.

    It need not be there yet. A password is never part of the URL.
    """
    from kvstow_api.client import calls

    with connection.client() as client:
        emit(client.send(calls.attach_tier(url, write=write)), style, _attached)


@tier.command()
@format_flag
@remote
def detach(connection: Connection, style: Format) -> None:
    """Stop using the store. What it has stays there.

    Waits until calls to the store that are under way have ended.
    """
    from kvstow_api.client import calls

    with connection.client() as client:
        emit(client.send(calls.detach_tier()), style, lambda view: "the store is detached")


def _attached(view: TierView) -> str:
    return f"{view.url} is attached, writing {view.write}; `kvstow get tier` shows whether it answers"


@tier.command()
@click.option("--off", is_flag=True, help="End the bypass: use the store again.")
@click.option("--ttl", type=TIME, help="For this long; otherwise until --off.")
@format_flag
@switch_pool_flag
@remote
def bypass(connection: Connection, off: bool, ttl: float | None, style: Format, pool: str | None) -> None:
    """Leave the store alone: put nothing, and fetch nothing.

    What is stored meanwhile is not put. Replaces any earlier bypass.
    """
    from kvstow_api.client import calls

    if off and ttl is not None:
        raise click.UsageError("give --ttl or --off, not both")
    with connection.client() as client:
        view = client.send(calls.bypass_tier(bypassed=not off, ttl_seconds=ttl, pool=pool))

    def say(view: TierBypassView) -> str:
        where = "" if pool is None else f" in pool {pool}"
        if off:
            return f"the store is used again{where}"
        return f"the store is bypassed{where}" + ("" if ttl is None else f" for {duration(ttl)}")

    emit(view, style, say)


@tier.command()
@click.argument("fingerprint")
@dry_run_flag
@yes_flag
@no_wait_flag
@format_flag
@remote
def purge(connection: Connection, fingerprint: str, dry_run: bool, yes: bool, no_wait: bool, style: Format) -> None:
    """Remove all objects of one FINGERPRINT from the store.

    All nodes that use the store lose them. `kvstow get tier -o wide` shows the fingerprints of this server.
    """
    from kvstow_api.client import calls
    from kvstow_api.views.operations import OperationView

    words = f"remove all objects of fingerprint {fingerprint} from the store, for all nodes that use it,"
    with connection.client() as client:
        if dry_run:
            view = client.send(calls.tier())
            emit(view, style, lambda view: f"would {words.rstrip(',')}: {view.url or 'no store is attached'}")
            return
        confirm(Effect(words, lost_blocks=None), connection, yes)
        found = follow(client, calls.purge_tier(fingerprint, wait=server_wait(no_wait)), no_wait=no_wait)
    running = isinstance(found, OperationView) and found.state == "running"
    emit(found, style, started if running else _purged)


def _purged(view: TierPurgedView | OperationView) -> str:
    objects = getattr(view, "objects", None)
    return f"removed {counted(view.progress.done if objects is None else objects, 'object')} from the store"  # type: ignore[union-attr]


@tier.command()
@click.argument("weights_id", metavar="NAME")
@click.option("--namespace", metavar="NAME", help="The namespace; needed only where the pool has several.")
@format_flag
@pool_flag
@remote
def weights(connection: Connection, weights_id: str, namespace: str | None, style: Format, pool: str | None) -> None:
    """Name the weights that an engine has now, after it has reset its prefix cache.

    From its next step on it shares blocks with all engines that name theirs the same. Until then it neither puts to
    the store nor fetches from it.
    """
    from kvstow_api.client import calls

    with connection.client() as client:
        wanted = chosen_pool(client, pool)
        view = client.send(calls.name_tier_weights(weights_id, pool=wanted, namespace=namespace))
    emit(view, style, lambda view: f"the weights of pool {wanted} are {weights_id} from the engine's next step on")
