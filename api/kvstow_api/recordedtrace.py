"""The answer that records a pool while its client reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvstow.control.recording import Recording
from kvstow_api.bodies import RecordBody
from kvstow_api.directory import HostedPool

POLL_SECONDS = 0.25
_SILENT_POLLS = 20  # then an empty line is sent, so that the client knows that the server is alive


class RecordedTrace(StreamingResponse):
    """Lines of a trace, and a last one about the recording. While the client does not read, nothing is taken from the
    recording, which then ends by itself. It begins and ends with this answer, whatever becomes of the connection."""

    def __init__(self, pool: HostedPool, limits: RecordBody, media_type: str) -> None:
        super().__init__(iter(()), media_type=media_type)
        self._pool, self._limits = pool, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._limits
        with self._pool.facade.record(seconds=limits.seconds, max_bytes=limits.max_bytes) as recording:
            self.body_iterator = self._lines(recording)
            await super().__call__(scope, receive, send)

    async def _lines(self, recording: Recording) -> AsyncIterator[bytes]:
        silent = 0
        while True:
            lines, end = await run_in_threadpool(recording.take)
            silent = 0 if lines else silent + 1
            if lines:
                yield lines
            elif silent % _SILENT_POLLS == 1:
                yield b"\n"
            if end is not None:
                told = {"end": end, "requests": recording.requests, "blocks": recording.blocks}
                yield json.dumps({"recording": told}, separators=(",", ":")).encode() + b"\n"
                return
            if not lines:
                await asyncio.sleep(POLL_SECONDS)
