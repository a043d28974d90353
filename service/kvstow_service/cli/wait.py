"""`kvstow wait`: until a server is as it should be."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import click

from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.exits import CommandError, ExitCode
from kvstow_service.cli.values import TIME

if TYPE_CHECKING:
    from kvstow_api.client import ApiError, Client
    from kvstow_api.views.ranks import ReadinessView

Condition = Literal["ready", "pinned", "drained"]

_POLL_SECONDS = 0.25
_PASSING = (429, 503)
"""Statuses that may be over in a moment."""


class _Look(NamedTuple):
    """Whether it is so, and how it is."""

    met: bool
    words: str


@click.command()
@click.option(
    "--for",
    "condition",
    type=click.Choice(get_args(Condition)),
    default="ready",
    show_default=True,
    help="ready: /readyz passes and the first slots are usable; pinned: the whole pool is; "
    "drained: a drain is on and nothing is in flight.",
)
@click.option("--timeout", type=TIME, default="5m", show_default=True, help="How long; 0 looks once.")
@remote
def wait(connection: Connection, condition: Condition, timeout: float) -> None:
    """Wait until the server is ready, pinned or drained.

    It may not even be there yet. Says what it waits for whenever that changes; exit code 3 when the time is over.
    """
    ends = time.monotonic() + timeout
    said = ""
    with connection.client() as client:
        while not (look := _look(client, condition)).met:
            if look.words != said:
                click.echo(f"waiting: {look.words}", err=True)
                said = look.words
            left = ends - time.monotonic()
            if left <= 0:
                fix = "`kvstow doctor` and `kvstow describe server` may say why; or wait longer: --timeout"
                raise CommandError(f"not {condition} after {timeout:g} s: {look.words}", fix, ExitCode.NOT_READY)
            time.sleep(min(_POLL_SECONDS, left))
    click.echo(look.words)


def _look(client: Client, condition: Condition) -> _Look:
    """A server that is away, or busy for a moment, is waited for; what it refuses for good is raised."""
    from kvstow_api.client import ApiError

    try:
        return _LOOKS[condition](client)
    except ApiError as error:
        if not _may_pass(error):
            raise
        return _Look(False, str(error))


def _may_pass(error: ApiError) -> bool:
    return error.status is None or error.status in _PASSING


def _ready(client: Client) -> _Look:
    from kvstow_api.client import calls

    probe, readiness = client.send(calls.probe("readyz")), client.send(calls.readiness())
    failed = [line for line in probe.text.splitlines() if line.startswith("[-]") and "(informational)" not in line]
    if not probe.ok:
        return _Look(False, "; ".join(line.removeprefix("[-]") for line in failed) or "/readyz fails")
    return _Look(bool(readiness.usable_slots), f"{readiness.state}: {_slots(readiness)}")


def _pinned(client: Client) -> _Look:
    from kvstow_api.client import calls

    readiness = client.send(calls.readiness())
    pinned = readiness.usable_slots >= readiness.capacity_slots
    return _Look(pinned, f"{readiness.state}: {_slots(readiness)}")


def _drained(client: Client) -> _Look:
    from kvstow_api.client import calls

    drain = client.send(calls.drain_status())
    if not drain.active:
        return _Look(False, "no drain is on; `kvstow drain` starts one")
    if drain.drained:
        return _Look(True, "drained: nothing is in flight")
    return _Look(False, f"draining: {drain.pending_transfers} transfers and {drain.leases} leases are left")


_LOOKS = {"ready": _ready, "pinned": _pinned, "drained": _drained}


def _slots(readiness: ReadinessView) -> str:
    return f"{readiness.usable_slots:,} of {readiness.capacity_slots:,} slots are usable"
