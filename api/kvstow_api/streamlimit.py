"""Limits on open streams: in total and per client, with places reserved for admins.

Not sse-starlette, which has no such limits and would replace ten lines, those of the comments that keep a silent
stream open. Importing it replaces `uvicorn.Server.handle_exit` in the whole process, an inference engine's perhaps,
and it looks for the end of the server at the handler that the process has for SIGTERM, twice a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvstow.errors import QueueFullError
from kvstow_api.auth import is_stranger

_MEDIA_TYPE = "text/event-stream"


class StreamLimit:
    """At most `most` streams at a time. Unauthenticated clients (`is_stranger`) get all but `reserved` of them, and at
    most `per_client` from one IP address. Used on the event loop."""

    def __init__(self, noun: str, *, most: int, reserved: int, per_client: int) -> None:
        """`noun`: the streams in the plural, for the error message."""
        self._noun = noun
        self._most, self._public_most, self._per_client = most, most - reserved, per_client
        self._clients: Counter[str] = Counter()  # open streams of unauthenticated clients, by address
        self.open = 0

    @contextmanager
    def place(self, scope: Scope) -> Iterator[None]:
        """Counts one more stream while the context is open. Raises `QueueFullError` if a limit is reached."""
        client: str | None = scope["client"][0] if is_stranger(scope) else None
        self._check(client)
        self.open += 1
        if client is not None:
            self._clients[client] += 1
        try:
            yield
        finally:
            self.open -= 1
            if client is not None:
                self._clients[client] -= 1
                if not self._clients[client]:
                    del self._clients[client]

    def _check(self, client: str | None) -> None:
        noun = self._noun
        if self.open >= self._most:
            raise QueueFullError(f"too many open {noun} (limit {self._most})")
        if client is None:
            return
        if self._clients[client] >= self._per_client:
            raise QueueFullError(f"too many open {noun} from {client} (limit {self._per_client})")
        if self._clients.total() >= self._public_most:
            raise QueueFullError(
                f"too many open {noun} (limit {self._public_most}, and {self._most} for admins and the Unix socket)"
            )


class LimitedStream(StreamingResponse):
    """Server-sent events that occupy a place from before the first byte until the client disconnects.

    The place is taken when the response is sent, not when it is created: a response that is never sent takes none, and
    two requests cannot both get the last place."""

    def __init__(self, content: AsyncIterable[bytes], limit: StreamLimit) -> None:
        super().__init__(content, media_type=_MEDIA_TYPE)
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._limit.place(scope):
            await super().__call__(scope, receive, send)
