"""The status page's stream: each part of the page, whenever it has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from kvstow.errors import QueueFullError
from kvstow_api.page.facts import Facts, look
from kvstow_api.services import Services

if TYPE_CHECKING:
    from kvstow_api.page.render import Renderer

MAX_STREAMS = 16
_INTERVAL = 1.0
_SILENT_TICKS = 15  # then a comment is sent, so that a browser knows that the server is there
_RETRY_MS = 2000


class StatusPage:
    """The page of one application, and the streams of those who look at it. Used on the event loop."""

    def __init__(self, use: Services) -> None:
        self._use = use
        self._renderer: Renderer | None = None
        self._open = 0

    async def document(self) -> str:
        return (await self._ready()).document(self._look())

    async def headers(self) -> Mapping[str, str]:
        return (await self._ready()).headers

    def open(self, interval: float = _INTERVAL) -> AsyncIterator[bytes]:
        """Server-sent events named after the parts, with their HTML. Raises `QueueFullError` where there are too
        many streams."""
        if self._open >= MAX_STREAMS:
            raise QueueFullError(f"{MAX_STREAMS} browsers look at this page; no more may")
        return self._run(interval)

    async def _run(self, interval: float) -> AsyncIterator[bytes]:
        self._open += 1
        try:
            yield f"retry: {_RETRY_MS}\n\n".encode()
            renderer = await self._ready()
            shown: dict[str, str] = {}
            silent = 0
            while True:
                now = renderer.sections(self._look())
                changed = "".join(_event(name, html) for name, html in now.items() if shown.get(name) != html)
                shown.update(now)
                silent = 0 if changed else silent + 1
                if changed:
                    yield changed.encode()
                elif silent % _SILENT_TICKS == 0:
                    yield b": nothing changed\n\n"
                await asyncio.sleep(interval)
        finally:
            self._open -= 1

    def _look(self) -> Facts:
        return look(self._use)

    async def _ready(self) -> Renderer:
        if self._renderer is None:
            self._renderer = await run_in_threadpool(_make_renderer)
        return self._renderer


def _make_renderer() -> Renderer:
    """Jinja2 is imported with the first page: the probes shall not wait for it."""
    from kvstow_api.page.render import Renderer

    return Renderer()


def _event(name: str, html: str) -> str:
    data = "".join(f"data: {line}\n" for line in html.splitlines())
    return f"event: {name}\n{data}\n"
