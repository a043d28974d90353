"""The content of the status page: the overview, and the checks and events that only the page shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstow_api.appstate import AppState
from kvstow_api.directory import HostedPool
from kvstow_api.hostreadiness import host_readiness
from kvstow_api.overview import (
    NUM_OLDEST,
    NodeReadings,
    Overview,
    PoolReadings,
    RankLine,
    Readings,
    overview,
    select_ranks,
)
from kvstow_api.poolview import pool_views
from kvstow_api.probe import Finding
from kvstow_api.views import POOL_NAME, SessionView

_RANKS = 16
_EVENTS = 8


class Check(NamedTuple):
    """`level`: ok, bad, or open for a failed check that fails no probe. `words`: why it fails, unless the engine's
    reason says so."""

    name: str
    level: str
    words: str


class EventLine(NamedTuple):
    time: str
    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class Content:
    """`server` has nothing that changes while it runs: a section of the page is sent again whenever it changes."""

    overview: Overview
    server: str
    checks: tuple[Check, ...]
    ranks: tuple[RankLine, ...]
    more_ranks: int
    events: tuple[EventLine, ...]


def read_content(app: AppState) -> Content:
    """The present content. On the event loop; O(ranks)."""
    host, directory = app.host, app.directory
    pools = directory.pools()
    readings = Readings(
        model=host.settings.get("model"),
        mode=host.mode,
        version=host.version,
        readiness=host_readiness(directory),
        drain=directory.switches.drain_status,
        bypass=directory.switches.bypass,
        pool=_pool_readings(app, pools[0]) if len(pools) == 1 else None,
        node=_node_readings(app) if directory.is_node else None,
    )
    shown = overview(readings)
    return Content(
        overview=shown,
        server=", ".join((shown.about, *host.addresses[:1], f"since {app.started:%Y-%m-%d %H:%M:%S} UTC")),
        checks=tuple(_check(one, shown.reason) for one in app.health.probes["readyz"].run().findings),
        ranks=tuple(select_ranks(shown.ranks, _RANKS)),
        more_ranks=max(0, len(shown.ranks) - _RANKS),
        events=_events(app),
    )


def _pool_readings(app: AppState, pool: HostedPool) -> PoolReadings:
    facade = pool.facade
    return PoolReadings(
        pinning_paused=facade.desired().paused,
        stats=facade.stats(),
        oldest=facade.transfers(NUM_OLDEST),
        history=app.sampler.history_of(pool.name),
    )


def _node_readings(app: AppState) -> NodeReadings:
    directory = app.directory
    return NodeReadings(
        memory=directory.memory(),
        pools=pool_views(app),
        sessions=[SessionView.of(session) for session in directory.sessions()],
    )


def _check(finding: Finding, reason: str) -> Check:
    failure = finding.failure or ""
    level = "ok" if finding.failure is None else "bad" if finding.required else "open"
    return Check(finding.name, level, "" if failure.endswith(reason) else failure)


def _events(app: AppState) -> tuple[EventLine, ...]:
    """The newest first."""
    entries, _ = app.journal.after(max(0, app.journal.last - _EVENTS))
    return tuple(
        EventLine(entry.data["time"], entry.type, _of_pool(entry.data) + _words(entry.type, entry.data))
        for entry in entries[::-1]
    )


def _words(kind: str, data: Mapping[str, Any]) -> str:
    match kind:
        case "state":
            return f"{data['state']}: {data['reason']}"
        case "rank":
            return f"{data['rank']} is {data['state']}" + (f": {data['error']}" if data["error"] else "")
        case "operation":
            noun = f"dry run of {data['kind']}" if data["dry_run"] else data["kind"]
            return f"{noun} {data['state']}" + (f": {data['error']}" if data["error"] else "")
        case _:
            return f"{data['method']} {data['path']} by {data['actor']}"


def _of_pool(data: Mapping[str, Any]) -> str:
    """The pool of an event of a node."""
    name = data.get("pool")
    return "" if name in (None, POOL_NAME) else f"{name}: "
