"""What the routes of one application work with, and how they get it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Depends, Request

from kvstow.control.engine import OffloadEngine
from kvstow_api.auth import Credentials
from kvstow_api.context import ApiContext
from kvstow_api.eventstream import EventStreams
from kvstow_api.health import Health
from kvstow_api.journal import Journal
from kvstow_api.loglevels import LogLevels
from kvstow_api.looplag import LoopMonitor
from kvstow_api.measurements import RankClocks
from kvstow_api.operations import Operations
from kvstow_api.requests import HttpCounters
from kvstow_api.watch import Watch


@dataclass(frozen=True, slots=True)
class Services:
    """One application's parts. Made by `create_app`, never shared between two."""

    context: ApiContext
    health: Health
    loop: LoopMonitor
    operations: Operations
    journal: Journal
    streams: EventStreams
    watch: Watch
    clocks: RankClocks
    log_levels: LogLevels
    http: HttpCounters
    credentials: Credentials
    settings_lock: asyncio.Lock
    """Held while settings are compared and changed."""
    started: datetime
    started_at: float
    """`started` on the context's clock."""

    @classmethod
    def of(cls, context: ApiContext, http: HttpCounters, credentials: Credentials) -> Services:
        loop = LoopMonitor()
        journal = Journal()
        return cls(
            context=context,
            health=Health(context, loop),
            loop=loop,
            operations=Operations(context.clock, journal),
            journal=journal,
            streams=EventStreams(context.engine, journal),
            watch=Watch(context.engine, journal),
            clocks=RankClocks(),
            log_levels=LogLevels(),
            http=http,
            credentials=credentials,
            settings_lock=asyncio.Lock(),
            started=datetime.now(UTC),
            started_at=context.clock(),
        )

    @property
    def engine(self) -> OffloadEngine:
        return self.context.engine

    @property
    def uptime(self) -> float:
        return self.context.clock() - self.started_at


async def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Use = Annotated[Services, Depends(services_of)]
"""Type of a route's parameter that receives the `Services`."""
