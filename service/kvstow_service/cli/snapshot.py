"""What `kvstow top` shows: the server at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstow.status import Readiness, TransferStatus
from kvstow_api.history import NowView, SampleView
from kvstow_api.views import InfoView, StatsView
from kvstow_api.words import Switch, switched

if TYPE_CHECKING:
    from kvstow_api.client import Client

_OLDEST = 4


@dataclass(frozen=True, slots=True)
class Snapshot:
    info: InfoView
    readiness: Readiness
    switches: tuple[Switch, ...]
    stats: StatsView
    oldest: tuple[TransferStatus, ...]
    history: tuple[SampleView, ...]
    now: NowView


def look(client: Client) -> Snapshot:
    """The server's state now. Raises `ApiError` if it does not answer."""
    from kvstow_api.client import calls

    send = client.send
    history, paused = send(calls.history()), send(calls.pool()).pinning_paused
    return Snapshot(
        info=send(calls.info()),
        readiness=send(calls.readiness()),
        switches=tuple(switched(send(calls.drain_status()), send(calls.bypass_status()), pinning_paused=paused)),
        stats=send(calls.stats()),
        oldest=tuple(send(calls.transfers(slowest=_OLDEST)).items),
        history=tuple(history.items),
        now=history.now,
    )
