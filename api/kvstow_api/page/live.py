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


class _Section(NamedTuple):
    """A section of the page, as HTML and as a server-sent event, and the version of the page that changed it."""

    html: str
    event: bytes
    version: int


class StatusPage:
    """The page of one application, and the streams of its viewers. Used on the event loop.

    Rendering takes about 2 ms, so all viewers share the result: the page is rendered at most once a second, whatever
    the number of viewers and requests. Each section is encoded once, when it changes.
    """

    def __init__(self, app: AppState) -> None:
        self._app = app
        self._clock = app.host.clock
        self._renderer: Renderer | None = None
        self._rendered_at = float("-inf")
        self._version = 0
        self._sections: dict[str, _Section] = {}
        self._document: bytes | None = None  # None until the present version is requested
        self._state = ""
        self.limit = StreamLimit(
            "status pages", most=MAX_STREAMS, reserved=RESERVED_STREAMS, per_client=STREAMS_PER_CLIENT
        )
        """Counts the open streams."""

    async def document(self) -> bytes:
        """The whole page."""
        renderer = await self._ready()
        self._refresh(renderer)
        if self._document is None:
            html = {name: section.html for name, section in self._sections.items()}
            self._document = renderer.document(self._state, html).encode()
        return self._document

    async def headers(self) -> Mapping[str, str]:
        return (await self._ready()).headers

    async def open(self, poll: float | None = None) -> AsyncIterator[bytes]:
        """Server-sent events with the HTML of the sections, named after them: first all, then those that have changed.
        `poll`: seconds between two checks of the shared page; by default until it is rendered again."""
        yield f"retry: {_RETRY_MS}\n\n".encode()
        renderer = await self._ready()
        seen, sent_at = 0, self._clock()
        while True:
            self._refresh(renderer)
            news = b"".join(section.event for section in self._sections.values() if section.version > seen)
            seen = self._version
            if not news and self._clock() - sent_at >= SILENT_SECONDS:
                news = b": nothing changed\n\n"
            if news:
                sent_at = self._clock()
                yield news
            left = self._rendered_at + INTERVAL - self._clock()
            await asyncio.sleep(max(0.0, left) if poll is None else poll)

    def _refresh(self, renderer: Renderer) -> None:
        """Render the page if it is older than the interval."""
        now = self._clock()
        if now - self._rendered_at < INTERVAL:
            return
        content = read_content(self._app)
        self._rendered_at, self._state = now, content.overview.state
        version = self._version + 1
        for name, html in renderer.sections(content).items():
            if name not in self._sections or self._sections[name].html != html:
                self._sections[name] = _Section(html, _event(name, html), version)
                self._version, self._document = version, None

    async def _ready(self) -> Renderer:
        if self._renderer is None:
            self._renderer = await run_in_threadpool(_make_renderer)
        return self._renderer


def _make_renderer() -> Renderer:
    """Imports Jinja2 with the first page, so that the first probes need not wait for it."""
    from kvstow_api.page.render import Renderer

    return Renderer()


def _event(name: str, html: str) -> bytes:
    data = "".join(f"data: {line}\n" for line in html.splitlines())
    return f"event: {name}\n{data}\n".encode()
