"""How many streams a server keeps open: in total and for each client, with places reserved for admins."""

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
    """`most` streams at once. Unauthenticated clients (`is_stranger`) get all but `reserved` of them, at most
    `per_client` from one IP address. Used on the event loop."""

    def __init__(self, noun: str, *, most: int, reserved: int, per_client: int) -> None:
        """`noun`: what is counted, in the plural, for the text of a refusal."""
        self._noun = noun
        self._most, self._public_most, self._per_client = most, most - reserved, per_client
        self._clients: Counter[str] = Counter()  # streams of strangers, by address
        self.open = 0

    @contextmanager
    def place(self, scope: Scope) -> Iterator[None]:
        """Counts one more stream for as long as the context lasts. Raises `QueueFullError` where there is no room."""
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
            raise QueueFullError(f"{self._most} {noun} are open; no more may")
        if client is None:
            return
        if self._clients[client] >= self._per_client:
            raise QueueFullError(f"{self._per_client} {noun} of {client} are open; one client may have no more")
        if self._clients.total() >= self._public_most:
            raise QueueFullError(
                f"{self._public_most} {noun} are open; more are only for admins and on the Unix socket"
            )


class LimitedStream(StreamingResponse):
    """Server-sent events that hold a place from before the first byte until the client has gone.

    The place is taken where the answer is sent, not where it is made, so that an answer that is never sent holds none,
    and no two requests see the same last place."""

    def __init__(self, content: AsyncIterable[bytes], limit: StreamLimit) -> None:
        super().__init__(content, media_type=_MEDIA_TYPE)
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._limit.place(scope):
            await super().__call__(scope, receive, send)
