"""The content of the status page: the overview, and the events that only the page shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from kvstow_api.answers import POOL_NAME, ConditionView
from kvstow_api.appstate import AppState
from kvstow_api.columns import Table
from kvstow_api.directory import HostedPool
from kvstow_api.hostreadiness import host_readiness, live_ranks
from kvstow_api.overview import (
    NUM_OLDEST,
    Overview,
    PoolReadings,
    RankRow,
    Readings,
    overview,
    pool_to_show,
    select_ranks,
)
from kvstow_api.readings import curve_view, curves_view, pool_views, sessions_now, tier_view, transfers_view

_ROWS = 32
_RANKS = 16
_EVENTS = 8
_CONDITIONS = 12


class EventLine(NamedTuple):
    time: str
    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class Content:
    """`conditions`, `pools`, `sessions`, `tiers` and `ranks`: those of the overview, as far as they fit; `more_...`
    counts the others.
    `server` has nothing that changes while it runs: a section of the page is sent again whenever it changes."""

    overview: Overview
    server: str
    conditions: tuple[ConditionView, ...]
    more_conditions: int
    pools: Table
    sessions: Table
    tiers: Table
    ranks: tuple[RankRow, ...]
    more_ranks: int
    events: tuple[EventLine, ...]


def read_content(app: AppState, asked: str | None = None) -> Content:
    """The present content; `asked` is the pool that the viewer has chosen. On the event loop; O(pools + sessions +
    ranks)."""
    host, directory = app.host, app.directory
    pools = directory.pools()
    chosen = pool_to_show([pool.name for pool in pools], asked)
    shown_pools = [pool for pool in pools if chosen in (None, pool.name)]
    readings = Readings(
        model=host.settings.get("model"),
        mode=host.mode,
        version=host.version,
        host_name=host.host_name,
        attach=host.attach,
        node=directory.is_node,
        readiness=host_readiness(directory),
        pools=pool_views(directory, app.sampler),
        sessions=sessions_now(directory, app.sampler),
        transfers=transfers_view(shown_pools, NUM_OLDEST),
        asked=asked,
        tier=tier_view(directory),
        conditions=app.conditions.find().conditions,
        pool=None if chosen is None else _pool_readings(app, shown_pools[0]),
    )
    shown = overview(readings)
    return Content(
        overview=shown,
        server=", ".join((shown.about, *host.addresses[:1], f"since {app.started:%Y-%m-%d %H:%M:%S} UTC"))
        + (f"; engines attach at {shown.attach}" if shown.attach else ""),
        conditions=shown.conditions[:_CONDITIONS],
        more_conditions=max(0, len(shown.conditions) - _CONDITIONS),
        pools=shown.pools.limited(_ROWS),
        sessions=shown.sessions.limited(_ROWS),
        tiers=shown.tiers.limited(_ROWS),
        ranks=tuple(select_ranks(shown.ranks, _RANKS)),
        more_ranks=max(0, len(shown.ranks) - _RANKS),
        events=_events(app, chosen),
    )


def _pool_readings(app: AppState, pool: HostedPool) -> PoolReadings:
    return PoolReadings(
        stats=pool.facade.stats(),
        ranks=live_ranks(app.directory, pool),
        curves=curves_view(app.sampler, pool.name),
        curve=curve_view(app.sampler, pool),
    )


def _events(app: AppState, pool: str | None) -> tuple[EventLine, ...]:
    """The newest first: those of the pool and of the whole server, or of all pools."""
    entries, _ = app.journal.after(0)
    found = (entry for entry in reversed(entries) if pool is None or entry.data.get("pool") in (None, pool))
    return tuple(
        EventLine(entry.data["time"], entry.type, _of_pool(entry.data) + _words(entry.type, entry.data))
        for entry in islice(found, _EVENTS)
    )


def _words(kind: str, data: Mapping[str, Any]) -> str:
    match kind:
        case "state":
            return f"{data['state']}: {data['reason']}"
        case "session":
            return f"{data['engine'] or data['session']} is {data['state']}: {data['reason']}"
        case "rank":
            return f"{data['rank']} is {data['state']}" + (f": {data['error']}" if data["error"] else "")
        case "tier":
            return f"tier of {data['namespace']} is {data['state']}" + (f": {data['reason']}" if data["reason"] else "")
        case "policy":
            return (
                f"k of the order of eviction is {data['k']:g}: {data['ratio_before']:.1%} to {data['ratio']:.1%} hits"
            )
        case "hints":
            way = "used again" if data["is_on"] else "not used any more"
            return f"hints are {way}: {data['ratio_with']:.1%} hits with them, {data['ratio_without']:.1%} without"
        case "operation":
            noun = f"dry run of {data['kind']}" if data["dry_run"] else data["kind"]
            return f"{noun} {data['state']}" + (f": {data['error']}" if data["error"] else "")
        case _:
            return f"{data['method']} {data['path']} by {data['actor']}"


def _of_pool(data: Mapping[str, Any]) -> str:
    """The pool of an event of a node."""
    name = data.get("pool")
    return "" if name in (None, POOL_NAME) else f"{name}: "
