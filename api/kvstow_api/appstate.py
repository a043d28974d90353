"""The parts of one application, which its routes work with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Depends, Request

from kvstow_api.auth import Credentials
from kvstow_api.directory import Directory
from kvstow_api.eventstream import EventStreams
from kvstow_api.health import Health
from kvstow_api.host import ApiHost
from kvstow_api.journal import Journal
from kvstow_api.looplag import LoopMonitor
from kvstow_api.measurements import RankClocks
from kvstow_api.operations import Operations
from kvstow_api.orphanwatch import OrphanWatch
from kvstow_api.requests import HttpCounters
from kvstow_api.sampler import Sampler


@dataclass(frozen=True, slots=True)
class AppState:
    """Made by `create_app`, never shared between two applications."""

    host: ApiHost
    health: Health
    loop: LoopMonitor
    operations: Operations
    journal: Journal
    streams: EventStreams
    sampler: Sampler
    orphans: OrphanWatch
    clocks: RankClocks
    http: HttpCounters
    credentials: Credentials
    settings_lock: asyncio.Lock
    """Held while settings are compared and changed."""
    started: datetime
    started_at: float
    """`started` on the host's clock."""

    @classmethod
    def of(cls, host: ApiHost, http: HttpCounters, credentials: Credentials) -> AppState:
        loop = LoopMonitor()
        journal = Journal()
        return cls(
            host=host,
            health=Health(host, loop),
            loop=loop,
            operations=Operations(host.clock, journal),
            journal=journal,
            streams=EventStreams(host.directory, journal),
            sampler=Sampler(host.directory, journal),
            orphans=OrphanWatch(host.orphaned_memory),
            clocks=RankClocks(),
            http=http,
            credentials=credentials,
            settings_lock=asyncio.Lock(),
            started=datetime.now(UTC),
            started_at=host.clock(),
        )

    @property
    def directory(self) -> Directory:
        return self.host.directory

    @property
    def uptime(self) -> float:
        return self.host.clock() - self.started_at


async def _state_of(request: Request) -> AppState:
    state: AppState = request.app.state.kvstow
    return state


App = Annotated[AppState, Depends(_state_of)]
"""Type of a route's parameter that receives the `AppState`."""
