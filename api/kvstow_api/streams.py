"""Streams: their limits, events that a client can resume after a disconnect, and the recording of a pool."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, Self

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvstow.control.blockevents import BlockEvent
from kvstow.control.recording import Recording
from kvstow.errors import QueueFullError
from kvstow.keys import format_key
from kvstow_api.answers import EventType
from kvstow_api.auth import is_stranger
from kvstow_api.bodies import RecordBody
from kvstow_api.directory import Directory, HostedPool
from kvstow_api.journal import Journal

_MEDIA_TYPE = "text/event-stream"


class StreamLimit:
    """Allows at most `most` streams at a time. Clients over TCP that are not admins (`is_stranger`), even with a
    viewer's token, get all but `reserved` of them, and at most `per_client` for each IP address. Used on the event
    loop."""

    def __init__(self, noun: str, *, most: int, reserved: int, per_client: int) -> None:
        """`noun` names the streams in error messages, in the plural."""
        self._noun = noun
        self._most, self._public_most, self._per_client = most, most - reserved, per_client
        self._clients: Counter[str] = Counter()  # open streams of strangers (see `is_stranger`), by address
        self.open = 0

    @contextmanager
    def place(self, scope: Scope) -> Iterator[None]:
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
            raise QueueFullError(f"{self._most} {noun} are open, and no more are allowed; close one of them")
        if client is None:
            return
        if self._clients[client] >= self._per_client:
            raise QueueFullError(
                f"{client} has {self._per_client} open {noun}, and one address may have no more; close one of them"
            )
        if self._clients.total() >= self._public_most:
            raise QueueFullError(
                f"{self._public_most} {noun} are open, and no more are allowed without a credential; admins may open "
                f"{self._most}, and so may callers of the Unix socket"
            )


class LimitedStream(StreamingResponse):
    """Server-sent events. The response takes a place before its first byte, until the client disconnects.

    It takes the place when it is sent, and not when it is created. So a response that is never sent takes none, and two
    requests cannot both get the last place."""

    def __init__(self, content: AsyncIterable[bytes], limit: StreamLimit) -> None:
        super().__init__(content, media_type=_MEDIA_TYPE)
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._limit.place(scope):
            await super().__call__(scope, receive, send)


MAX_STREAMS, RESERVED_STREAMS, STREAMS_PER_CLIENT = 32, 8, 16
"""How many event streams there may be, how many of them are reserved for admins and callers of the Unix socket, and how
many one address of other clients may have."""
POLL_SECONDS = 0.25  # a poll reads two counters; a callback under the engine's lock would make every store slower
_SILENT_POLLS = 60  # after this many polls without events, a comment shows the client that the server is alive
_MAX_BATCH = 100  # how many block events are read at once
_RETRY_MS = 2000
"""After how many milliseconds clients connect again."""

_CURSOR = re.compile(r"([0-9a-f]{1,32})-(\d{1,18})-(\d{1,18})")


class Cursor(NamedTuple):
    """A reader's position. It consists of an id for the life of the pool, or of the host if no pool was chosen, and of
    the numbers of the last entries that were read in the journal and among the pool's block events."""

    engine_id: str
    journal: int
    blocks: int

    def __str__(self) -> str:
        return "-".join(map(str, self))

    def is_before(self, other: Cursor) -> bool:
        return self.engine_id == other.engine_id and self.journal <= other.journal and self.blocks <= other.blocks

    @classmethod
    def parse(cls, text: str) -> Self | None:
        match = _CURSOR.fullmatch(text)
        return None if match is None else cls(match[1], int(match[2]), int(match[3]))


class EventStreams:
    """The streams of one server, each with its own cursor. Used on the event loop."""

    def __init__(self, directory: Directory, journal: Journal) -> None:
        self._directory, self._journal = directory, journal
        self.limit = StreamLimit(
            "event streams", most=MAX_STREAMS, reserved=RESERVED_STREAMS, per_client=STREAMS_PER_CLIENT
        )
        """The limit for streams, which counts them while they are sent."""
        self.lost = 0
        """How many events were dropped before a stream had read them."""

    def open(
        self,
        wanted: Collection[str],
        pool: HostedPool | None = None,
        *,
        after: str | None = None,
        recent: int = 0,
        poll: float = POLL_SECONDS,
    ) -> AsyncIterator[bytes]:
        """Open the stream of a pool, or of the host without one. It begins after the event with the id `after`, or else
        `recent` journal entries ago. Only a pool has events of blocks. Its stream leaves out entries of the journal
        about other pools."""
        if pool is None:
            now = Cursor(self._directory.engine_id, self._journal.last, 0)
        else:
            now = Cursor(pool.facade.engine_id, self._journal.last, pool.facade.events.last_sequence)
        begin, known = now._replace(journal=max(0, now.journal - recent)), True
        if after is not None:
            given = Cursor.parse(after)
            known = given is not None and given.is_before(now)
            begin = given if given is not None and known else now._replace(journal=0)
        reader = _Reader(pool, self._journal, frozenset(wanted), begin, self._count_lost)
        return self._run(reader, known, poll)

    async def _run(self, reader: _Reader, known: bool, poll: float) -> AsyncIterator[bytes]:
        yield f"retry: {_RETRY_MS}\n\n".encode()
        if not known:
            yield _with_id(reader.cursor, _message("lost", {"count": None}))
        silent = 0
        while True:
            chunk = b"".join(reader.read())
            silent = 0 if chunk else silent + 1
            if chunk:
                yield chunk
            elif silent % _SILENT_POLLS == 0:
                yield b": no events\n\n"
            if not reader.has_more:
                await asyncio.sleep(poll)

    def _count_lost(self, number: int) -> None:
        self.lost += number


class _Reader:
    """Reads journal and block events from a cursor on. With `has_more`, there is more to read without waiting."""

    def __init__(
        self,
        pool: HostedPool | None,
        journal: Journal,
        wanted: frozenset[str],
        cursor: Cursor,
        count_lost: Callable[[int], None],
    ) -> None:
        self._pool, self._journal, self._wanted, self._count_lost = pool, journal, wanted, count_lost
        self.cursor, self.has_more = cursor, False

    def read(self) -> Iterator[bytes]:
        yield from self._read_journal()
        yield from self._read_blocks()

    def _read_journal(self) -> Iterator[bytes]:
        if self._journal.last == self.cursor.journal:
            return
        entries, lost = self._journal.after(self.cursor.journal)
        yield from self._lost(lost)
        for entry in entries:
            self.cursor = self.cursor._replace(journal=entry.sequence)
            if entry.type in self._wanted and (self._pool is None or entry.data.get("pool") in (None, self._pool.name)):
                yield _with_id(self.cursor, _message(entry.type, entry.data))

    def _read_blocks(self) -> Iterator[bytes]:
        if self._pool is None:
            return
        log = self._pool.facade.events
        self.has_more = False
        if not {"stored", "removed"} & self._wanted or log.last_sequence == self.cursor.blocks:
            self.cursor = self.cursor._replace(blocks=log.last_sequence)
            return
        page = log.read(self.cursor.blocks, _MAX_BATCH)
        self.has_more = len(page.events) == _MAX_BATCH
        yield from self._lost(page.lost)
        for event in page.events:
            self.cursor = self.cursor._replace(blocks=event.sequence)
            if event.kind in self._wanted:
                yield _with_id(self.cursor, _encode(event, self._pool.name))

    def _lost(self, count: int) -> Iterator[bytes]:
        if count:
            self._count_lost(count)
            yield _with_id(self.cursor, _message("lost", {"count": count}))


@lru_cache(maxsize=_MAX_BATCH + 28)  # shared by all streams; an event of 1,024 keys takes 0.3 ms and 80 KiB
def _encode(event: BlockEvent, pool: str) -> bytes:
    data: dict[str, Any] = {"pool": pool, "keys": [format_key(key) for key in event.keys]}
    if event.kind == "removed":
        data["reason"] = event.reason
    return _message(event.kind, data)


def _message(kind: EventType, data: dict[str, Any]) -> bytes:
    """Make a server-sent event without its id. JSON in ASCII contains no line breaks."""
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def _with_id(cursor: Cursor, message: bytes) -> bytes:
    return b"id: %s\n%s" % (str(cursor).encode(), message)


TRACE_POLL_SECONDS = 0.25
_SILENT_TRACE_POLLS = 20  # after this many polls without lines, an empty line shows the client that the server is alive


class RecordedTrace(StreamingResponse):
    """Sends the lines of a trace, and a last line about the recording. While the client does not read, no lines are
    taken from the recording, which then ends by itself. The recording begins and ends with this response, even if the
    connection breaks."""

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
            elif silent % _SILENT_TRACE_POLLS == 1:
                yield b"\n"
            if end is not None:
                summary = {"end": end, "requests": recording.requests, "blocks": recording.blocks}
                yield json.dumps({"recording": summary}, separators=(",", ":")).encode() + b"\n"
                return
            if not lines:
                await asyncio.sleep(TRACE_POLL_SECONDS)
