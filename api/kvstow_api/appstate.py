"""The parts of one application, which its routes work with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Depends, Request

from kvstow_api.auth import Credentials
from kvstow_api.conditions.table import Conditions
from kvstow_api.directory import Directory, TierMeasurements
from kvstow_api.eventstream import EventStreams
from kvstow_api.health import Check, Health, LoopMonitor, host_checks
from kvstow_api.host import ApiHost
from kvstow_api.hostwatch import HostWatch, RankClocks
from kvstow_api.journal import Journal
from kvstow_api.operations import Operations
from kvstow_api.requests import HttpCounters
from kvstow_api.sampler import Sampler


@dataclass(frozen=True, slots=True)
class AppState:
    """Made by `create_app`, never shared between two applications."""

    host: ApiHost
    conditions: Conditions
    health: Health
    loop: LoopMonitor
    operations: Operations
    journal: Journal
    streams: EventStreams
    sampler: Sampler
    watch: HostWatch
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
        sampler, clocks = Sampler(host.directory, journal), RankClocks()
        watch = HostWatch(host.host_memory, host.orphaned_memory, lambda: _measure_tier(host.directory), host.clock)
        process = [Check("loop", loop.failure), *host_checks(host.ready_checks)]
        conditions = Conditions(host, process, sampler, watch, clocks, credentials)
        return cls(
            host=host,
            conditions=conditions,
            health=Health(host, process, conditions.failures),
            loop=loop,
            operations=Operations(host.clock, journal),
            journal=journal,
            streams=EventStreams(host.directory, journal),
            sampler=sampler,
            watch=watch,
            clocks=clocks,
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


def _measure_tier(directory: Directory) -> TierMeasurements | None:
    return None if directory.tier is None else directory.tier.measure()


async def _state_of(request: Request) -> AppState:
    state: AppState = request.app.state.kvstow
    return state


App = Annotated[AppState, Depends(_state_of)]
"""Type of a route's parameter that receives the `AppState`."""
