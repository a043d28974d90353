"""The status page, rendered once a second for all viewers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from starlette.concurrency import run_in_threadpool

from kvstow_api.appstate import AppState
from kvstow_api.page.content import read_content
from kvstow_api.streamlimit import StreamLimit

if TYPE_CHECKING:
    from kvstow_api.page.render import Renderer

MAX_STREAMS, RESERVED_STREAMS, STREAMS_PER_CLIENT = 64, 8, 16
INTERVAL = 1.0
"""Seconds before the page is rendered again."""
SILENT_SECONDS = 15.0
"""Seconds without changes before a comment shows the browser that the connection is alive."""
_RETRY_MS = 2000
_NO_POOL = ""
"""In place of all names that no pool has: they share a view, so that there are not more views than pools and two."""


class _Section(NamedTuple):
    """A section of the page, as HTML and as a server-sent event, and the version of the page that changed it."""

    html: str
    event: bytes
    version: int


class _View:
    """The page as viewers of one pool see it, or of all. `document` is None until the present version is requested."""

    def __init__(self) -> None:
        self.rendered_at = float("-inf")
        self.version = 0
        self.sections: dict[str, _Section] = {}
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
            html = {name: section.html for name, section in view.sections.items()}
            view.document = renderer.document(self._app.host.host_name, view.state, html).encode()
        return view.document

    async def headers(self) -> Mapping[str, str]:
        return (await self._ready()).headers

    async def open(self, pool: str | None = None, *, poll: float | None = None) -> AsyncIterator[bytes]:
        """Server-sent events with the HTML of the sections, named after them: first all, then those that have changed.
        `poll`: seconds between two checks of the shared page; by default until it is rendered again."""
        yield f"retry: {_RETRY_MS}\n\n".encode()
        renderer = await self._ready()
        seen, sent_at = (_View(), 0), self._clock()
        while True:
            view = self._refreshed(renderer, pool)
            version = seen[1] if seen[0] is view else 0
            news = b"".join(section.event for section in view.sections.values() if section.version > version)
            seen = (view, view.version)
            if not news and self._clock() - sent_at >= SILENT_SECONDS:
                news = b": nothing changed\n\n"
            if news:
                sent_at = self._clock()
                yield news
            left = view.rendered_at + INTERVAL - self._clock()
            await asyncio.sleep(max(0.0, left) if poll is None else poll)

    def _refreshed(self, renderer: Renderer, pool: str | None) -> _View:
        """The view of the pool, rendered again if it is older than the interval."""
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
        view.rendered_at, view.state = now, content.overview.state
        version = view.version + 1
        for name, html in renderer.sections(content).items():
            if name not in view.sections or view.sections[name].html != html:
                view.sections[name] = _Section(html, _event(name, html), version)
                view.version, view.document = version, None
        return view

    async def _ready(self) -> Renderer:
        if self._renderer is None:
            self._renderer = await run_in_threadpool(_make_renderer)
        return self._renderer


def _make_renderer() -> Renderer:
    """Imports Jinja2 with the first page, so that the first probes need not wait for it."""
    from kvstow_api.page.render import Renderer

    return Renderer()


def _event(name: str, html: str) -> bytes:
    lines = html.splitlines() or [""]  # browsers ignore an event without any data
    data = "".join(f"data: {line}\n" for line in lines)
    return f"event: {name}\n{data}\n".encode()
