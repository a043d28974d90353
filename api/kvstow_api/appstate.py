"""The parts of one application that its routes work with."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Depends, Request

from kvstow_api.answers import InfoView
from kvstow_api.auth import Credentials
from kvstow_api.conditions.table import Conditions
from kvstow_api.health import Check, LoopMonitor, make_probes
from kvstow_api.host import ApiHost
from kvstow_api.hostwatch import HostWatch, RankClocks
from kvstow_api.journal import Journal
from kvstow_api.middleware import HttpCounters
from kvstow_api.operations import Operations
from kvstow_api.sampler import Sampler
from kvstow_api.streams import EventStreams


class AppState:
    """The parts of an application. `create_app` makes them, and two applications never share them. `settings_lock` is
    held while settings are compared and changed. Raises `ConfigError` if the token file cannot be used."""

    def __init__(self, host: ApiHost) -> None:
        self.host, self.directory = host, host.directory
        self.started, self.started_at = datetime.now(UTC), host.clock()
        self.credentials = Credentials.of(host)
        self.http = HttpCounters()
        self.settings_lock = asyncio.Lock()
        self.loop = LoopMonitor()
        self.journal = Journal()
        self.clocks = RankClocks()
        self.sampler = Sampler(host.directory, self.journal)
        self.watch = HostWatch(host, self.credentials.renew)
        process = [Check("loop", self.loop.failure), *map(Check, host.ready_checks, host.ready_checks.values())]
        self.conditions = Conditions(host, process, self.sampler, self.watch, self.clocks, self.credentials)
        self.probes = make_probes(host, process, self.conditions.failures)
        self.operations = Operations(host.clock, self.journal)
        self.streams = EventStreams(host.directory, self.journal)


def info_view(app: AppState) -> InfoView:
    host = app.host
    return InfoView(
        version=host.version,
        mode=host.mode,
        node=app.directory.is_node,
        host_name=host.host_name,
        attach=host.attach,
        addresses=list(host.addresses),
        engine_id=app.directory.engine_id,
        started=app.started,
        uptime_seconds=host.clock() - app.started_at,
        token_required=host.token_file is not None or host.client_certificates,
        num_ranks=sum(len(pool.facade.readiness().ranks) for pool in app.directory.pools()),
        pools=[pool.name for pool in app.directory.pools()],
        build=dict(host.build),
        settings=dict(host.settings),
    )


async def _state_of(request: Request) -> AppState:
    state: AppState = request.app.state.kvstow
    return state


App = Annotated[AppState, Depends(_state_of)]
"""The type of a route's parameter that receives the `AppState`."""
