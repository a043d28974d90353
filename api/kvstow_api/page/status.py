"""The status page, rendered once a second for all viewers: its content, its HTML, whose values Jinja2 escapes, and its
SVG geometry (curves in a box of 300 by 48, and a bar that is 1000 wide)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from itertools import groupby, islice
from typing import Any, NamedTuple

from starlette.concurrency import run_in_threadpool

from kvstow_api.answers import POOL_NAME
from kvstow_api.appstate import AppState, info_view
from kvstow_api.directory import HostedPool, host_readiness, live_ranks
from kvstow_api.figures import CURVE_POINTS
from kvstow_api.overview import (
    NUM_OLDEST,
    Overview,
    PoolReadings,
    Readings,
    overview,
    pool_to_show,
    select_ranks,
)
from kvstow_api.readings import curve_view, curves_view, pool_views, sessions_now, tier_view, transfers_view
from kvstow_api.streams import StreamLimit

WIDTH, HEIGHT = 300, 48
_MARGIN = 2  # for the width of a stroke at the edge
_BAR = 1000
_LEAST = 4  # so that every state with a slot is visible


class Part(NamedTuple):
    name: str
    slots: int
    begin: int
    width: int


def bar(counts: Mapping[str, int]) -> tuple[Part, ...]:
    """Parts as wide as their share."""
    total, begin, parts = sum(counts.values()), 0, []
    for name, count in counts.items():
        width = min(max(_LEAST, round(count * _BAR / total)), _BAR - begin) if count else 0
        parts.append(Part(name, count, begin, width))
        begin += width
    return tuple(parts)


def polylines(points: Sequence[float | None], count: int, top: float) -> tuple[str, ...]:
    """One polyline for each run of points without a gap, from 0 to `top`. `count` points fill the box; the newest is at
    its right edge."""
    shown = points[-count:]
    step = WIDTH / max(count - 1, 1)
    left = WIDTH - step * (len(shown) - 1)
    placed = [(left + step * number, point) for number, point in enumerate(shown)]
    runs = groupby(placed, key=lambda place: place[1] is not None)
    return tuple(" ".join(_spots(list(run), top)) for there, run in runs if there)


def _spots(run: Sequence[tuple[float, float | None]], top: float) -> list[str]:
    spots = [f"{x:.0f},{_height(point or 0.0, top):.1f}" for x, point in run]
    return spots if len(spots) > 1 else [spots[0], f"{run[0][0] + 1:.0f},{spots[0].partition(',')[2]}"]


def _height(point: float, top: float) -> float:
    share = min(1.0, point / top) if top > 0 else 0.0
    return _MARGIN + (HEIGHT - 2 * _MARGIN) * (1 - share)


class SizePlot(NamedTuple):
    """Geometry of shares by size, in a box of 300 by 48 whose columns are equally wide: a polyline, and the middle of
    each column with the height of its share."""

    line: str
    spots: tuple[tuple[str, str], ...]


def size_plot(ratios: Sequence[float], top: float) -> SizePlot:
    spots = tuple(
        (f"{WIDTH * (2 * number + 1) / (2 * len(ratios)):.1f}", f"{_height(ratio, top):.1f}")
        for number, ratio in enumerate(ratios)
    )
    return SizePlot(" ".join(f"{x},{y}" for x, y in spots), spots)


SECTIONS = (
    "state",
    "memory",
    "pools",
    "sessions",
    "tier",
    "ranks",
    "slots",
    "charts",
    "sizes",
    "pending",
    "evictions",
    "events",
)
"""Sections that are updated separately. `sections.html` has a macro for each."""


class Renderer:
    """Compiles the templates when it is created, which takes tens of milliseconds: not for an event loop."""

    def __init__(self) -> None:
        from jinja2 import Environment, PackageLoader  # with the first page: the first probes need not wait for it

        environment = Environment(
            loader=PackageLoader("kvstow_api.page", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        environment.globals.update(bar=bar, polylines=polylines, size_plot=size_plot, num_points=CURVE_POINTS, zip=zip)
        self._page = environment.get_template("page.html")
        self._macros = environment.get_template("sections.html").module
        self._style, self._script = _asset("page.css"), _asset("page.js")

    def sections(self, content: Content) -> dict[str, str]:
        return {name: getattr(self._macros, name)(content).strip() for name in SECTIONS}

    def document(self, host_name: str, state: str, sections: Mapping[str, str]) -> str:
        """The whole page, from the host's name, its state and the output of `sections`."""
        return self._page.render(
            host_name=host_name, state=state, sections=sections, style=self._style, script=self._script
        )

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """Allow the browser to show the page, run its script, and connect to this server; nothing else."""
        policy = {
            "default-src": "'none'",
            "style-src": _digest(self._style),
            "script-src": _digest(self._script),
            "connect-src": "'self'",
            "img-src": "data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        text = "; ".join(f"{directive} {source}" for directive, source in policy.items())
        return {"Content-Security-Policy": text, "Referrer-Policy": "no-referrer"}


def _asset(name: str) -> str:
    text = files("kvstow_api.page").joinpath(name).read_text(encoding="utf-8")
    return re.sub(r"\n\s*", "\n", text).strip()


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


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
    """`overview` is limited to what fits; `more_conditions` and `more_ranks` count the others. `server` has nothing
    that changes while it runs: a section of the page is sent again whenever it changes."""

    overview: Overview
    server: str
    more_conditions: int
    more_ranks: int
    events: tuple[EventLine, ...]


def read_content(app: AppState, asked: str | None = None) -> Content:
    """The present content; `asked` is the pool that the viewer has chosen. On the event loop; O(pools + sessions +
    ranks)."""
    host, directory = app.host, app.directory
    pools = directory.pools()
    chosen = pool_to_show([pool.name for pool in pools], asked)
    shown_pools = [pool for pool in pools if chosen in (None, pool.name)]
    shown = overview(
        Readings(
            info=info_view(app),
            readiness=replace(host_readiness(directory), conditions=app.conditions.find().conditions),
            pools=pool_views(directory, app.sampler),
            sessions=sessions_now(directory, app.sampler),
            transfers=transfers_view(shown_pools, NUM_OLDEST),
            asked=asked,
            tier=tier_view(directory),
            pool=None if chosen is None else _pool_readings(app, shown_pools[0]),
        )
    )
    return Content(
        overview=replace(
            shown,
            conditions=shown.conditions[:_CONDITIONS],
            pools=shown.pools.limited(_ROWS),
            sessions=shown.sessions.limited(_ROWS),
            tiers=shown.tiers.limited(_ROWS),
            ranks=tuple(select_ranks(shown.ranks, _RANKS)),
        ),
        server=", ".join((shown.about, *host.addresses[:1], f"since {app.started:%Y-%m-%d %H:%M:%S} UTC"))
        + (f"; engines attach at {shown.attach}" if shown.attach else ""),
        more_conditions=max(0, len(shown.conditions) - _CONDITIONS),
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
        case "operation":
            noun = f"dry run of {data['kind']}" if data["dry_run"] else data["kind"]
            return f"{noun} {data['state']}" + (f": {data['error']}" if data["error"] else "")
        case _:
            return f"{data['method']} {data['path']} by {data['actor']}"


def _of_pool(data: Mapping[str, Any]) -> str:
    name = data.get("pool")
    return "" if name in (None, POOL_NAME) else f"{name}: "


MAX_STREAMS, RESERVED_STREAMS, STREAMS_PER_CLIENT = 64, 8, 16
INTERVAL = 1.0
"""Seconds before the page is rendered again."""
SILENT_SECONDS = 15.0
"""Seconds without changes before a comment shows the browser that the connection is alive."""
_RETRY_MS = 2000
_NO_POOL = ""
"""In place of all names that no pool has: they share a view, so that there are not more views than pools and two."""


class _View:
    """The page as viewers of one pool see it, or of all. `sections` as HTML and `events` as server-sent events, by
    their names. An event stays the same object until its section changes. `document` is None until it is requested."""

    def __init__(self) -> None:
        self.rendered_at = float("-inf")
        self.sections: dict[str, str] = {}
        self.events: dict[str, bytes] = {}
        self.document: bytes | None = None
        self.state = ""


class StatusPage:
    """The page of one application, and the streams of its viewers. Used on the event loop.

    Rendering takes about 2 ms, so all viewers of a pool share the result: the page is rendered at most once a second
    for each pool, whatever the number of viewers and requests. Each section is encoded once, when it changes.
    """

    def __init__(self, app: AppState) -> None:
        self._app = app
        self._clock = app.host.clock
        self._renderer: Renderer | None = None
        self._views: dict[str | None, _View] = {}
        """By the pool that the viewers have chosen; None if they have chosen none."""
        self.limit = StreamLimit(
            "status pages", most=MAX_STREAMS, reserved=RESERVED_STREAMS, per_client=STREAMS_PER_CLIENT
        )
        """Counts the open streams."""

    async def document(self, pool: str | None = None) -> bytes:
        """The whole page; `pool` is the pool that the viewer has chosen."""
        renderer = await self._ready()
        view = self._refreshed(renderer, pool)
        if view.document is None:
            view.document = renderer.document(self._app.host.host_name, view.state, view.sections).encode()
        return view.document

    async def headers(self) -> Mapping[str, str]:
        return (await self._ready()).headers

    async def open(self, pool: str | None = None, *, poll: float | None = None) -> AsyncIterator[bytes]:
        """Server-sent events with the HTML of the sections, named after them: first all, then those that have changed.
        `poll`: seconds between two checks of the shared page; by default until it is rendered again."""
        yield f"retry: {_RETRY_MS}\n\n".encode()
        renderer = await self._ready()
        sent, sent_at = dict[str, bytes](), self._clock()
        while True:
            view = self._refreshed(renderer, pool)
            news = b"".join(event for name, event in view.events.items() if sent.get(name) is not event)
            sent = view.events
            if not news and self._clock() - sent_at >= SILENT_SECONDS:
                news = b": nothing changed\n\n"
            if news:
                sent_at = self._clock()
                yield news
            left = view.rendered_at + INTERVAL - self._clock()
            await asyncio.sleep(max(0.0, left) if poll is None else poll)

    def _refreshed(self, renderer: Renderer, pool: str | None) -> _View:
        if pool is not None and self._app.directory.find_pool(pool) is None:
            pool = _NO_POOL
        view = self._views.get(pool)
        if view is None:
            there = {None, _NO_POOL, *(one.name for one in self._app.directory.pools())}
            self._views = {name: one for name, one in self._views.items() if name in there}
            view = self._views[pool] = _View()
        now = self._clock()
        if now - view.rendered_at < INTERVAL:
            return view
        content = read_content(self._app, pool)
        sections = renderer.sections(content)
        if sections != view.sections:
            before, view.document = view.sections, None
            view.events = {
                name: view.events[name] if before.get(name) == html else _event(name, html)
                for name, html in sections.items()
            }
        view.rendered_at, view.state, view.sections = now, content.overview.state, sections
        return view

    async def _ready(self) -> Renderer:
        if self._renderer is None:
            self._renderer = await run_in_threadpool(Renderer)
        return self._renderer


def _event(name: str, html: str) -> bytes:
    lines = html.splitlines() or [""]  # browsers ignore an event without any data
    data = "".join(f"data: {line}\n" for line in lines)
    return f"event: {name}\n{data}\n".encode()
