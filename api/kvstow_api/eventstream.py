"""Streams of events that a client can resume where it was disconnected."""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Iterator
from typing import Any, NamedTuple, Self

from kvstow.control.blockevents import BlockEvent
from kvstow.keys import format_key
from kvstow_api.answers import EventType
from kvstow_api.directory import Directory, HostedPool
from kvstow_api.journal import Entry, Journal
from kvstow_api.streamlimit import StreamLimit

MAX_STREAMS, RESERVED_STREAMS, STREAMS_PER_CLIENT = 32, 8, 16
POLL_SECONDS = 0.25  # reads two counters; a callback under the engine's lock would cost every store more
_SILENT_POLLS = 60  # then a comment is sent, so that the client knows that the server is alive
_MAX_BATCH = 100  # block events read at once
_RETRY_MS = 2000
_MAX_KEPT_BYTES = 4 << 20

_CURSOR = re.compile(r"([0-9a-f]{1,32})-(\d{1,18})-(\d{1,18})")


class Cursor(NamedTuple):
    """A reader's position: the life of the pool, or of the host if no pool was chosen, and the last entry read of the
    journal and of the pool's block events."""

    engine_id: str
    journal: int
    blocks: int

    def __str__(self) -> str:
        return "-".join(map(str, self))

    def is_before(self, other: Cursor) -> bool:
        """Whether `other` is at or after this position, in the same life."""
        return self.engine_id == other.engine_id and self.journal <= other.journal and self.blocks <= other.blocks

    @classmethod
    def parse(cls, text: str) -> Self | None:
        match = _CURSOR.fullmatch(text)
        return None if match is None else cls(match[1], int(match[2]), int(match[3]))


class EventStreams:
    """The streams of one server, each with its own cursor. Used on the event loop."""

    def __init__(self, directory: Directory, journal: Journal) -> None:
        self._directory, self._journal = directory, journal
        self._messages = _Messages()
        self.limit = StreamLimit(
            "event streams", most=MAX_STREAMS, reserved=RESERVED_STREAMS, per_client=STREAMS_PER_CLIENT
        )
        """Counts each stream while it is sent."""
        self.lost = 0
        """Events that were dropped before a stream had read them."""

    def open(
        self,
        wanted: Collection[str],
        pool: HostedPool | None = None,
        *,
        after: str | None = None,
        recent: int = 0,
        poll: float = POLL_SECONDS,
    ) -> AsyncIterator[bytes]:
        """The stream of a pool, or without one of the host, from after the event with id `after`, or from `recent`
        journal entries ago. Only a pool has events of blocks, and its stream leaves out what the journal says of
        others."""
        if pool is None:
            now = Cursor(self._directory.engine_id, self._journal.last, 0)
        else:
            now = Cursor(pool.facade.engine_id, self._journal.last, pool.facade.events.last_sequence)
        begin, known = now._replace(journal=max(0, now.journal - recent)), True
        if after is not None:
            given = Cursor.parse(after)
            known = given is not None and given.is_before(now)
            begin = given if given is not None and known else now._replace(journal=0)
        reader = _Reader(pool, self._journal, self._messages, frozenset(wanted), begin)
        return self._run(reader, known, poll)

    async def _run(self, reader: _Reader, known: bool, poll: float) -> AsyncIterator[bytes]:
        yield f"retry: {_RETRY_MS}\n\n".encode()
        if not known:
            yield _with_id(reader.cursor, _message("lost", {"count": None}))
        silent = 0
        while True:
            chunk = b"".join(reader.read())
            self.lost += reader.take_lost()
            silent = 0 if chunk else silent + 1
            if chunk:
                yield chunk
            elif silent % _SILENT_POLLS == 0:
                yield b": no events\n\n"
            if not reader.behind:
                await asyncio.sleep(poll)


class _Messages:
    """The last events, encoded once for all streams: 0.3 ms for 1,024 keys. Without the id, which differs between
    streams. Bounded in bytes; the oldest are dropped first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._bytes = 0

    def of(self, event: Entry | BlockEvent, pool: HostedPool | None = None) -> bytes:
        """`pool`: whose block event it is; None for an entry of the journal."""
        name = "" if pool is None else pool.facade.engine_id, event.sequence
        message = self._kept.get(name)
        if message is None:
            message = self._kept[name] = _encode(event, "" if pool is None else pool.name)
            self._bytes += len(message)
            while self._bytes > _MAX_KEPT_BYTES:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= len(oldest)
        return message


class _Reader:
    """Reads journal and block events from a cursor on."""

    def __init__(
        self,
        pool: HostedPool | None,
        journal: Journal,
        messages: _Messages,
        wanted: frozenset[str],
        cursor: Cursor,
    ) -> None:
        self._pool, self._journal, self._messages, self._wanted = pool, journal, messages, wanted
        self.cursor = cursor
        self._num_lost = 0
        self.behind = False
        """There is more to read without waiting."""

    def read(self) -> Iterator[bytes]:
        yield from self._read_journal()
        yield from self._read_blocks()

    def take_lost(self) -> int:
        """How many events were lost since the last call."""
        lost, self._num_lost = self._num_lost, 0
        return lost

    def _read_journal(self) -> Iterator[bytes]:
        if self._journal.last == self.cursor.journal:
            return
        entries, lost = self._journal.after(self.cursor.journal)
        yield from self._lost(lost)
        for entry in entries:
            self.cursor = self.cursor._replace(journal=entry.sequence)
            if entry.type in self._wanted and self._is_of_pool(entry):
                yield _with_id(self.cursor, self._messages.of(entry))

    def _is_of_pool(self, entry: Entry) -> bool:
        return self._pool is None or entry.data.get("pool") in (None, self._pool.name)

    def _read_blocks(self) -> Iterator[bytes]:
        if self._pool is None:
            return
        log = self._pool.facade.events
        self.behind = False
        if not {"stored", "removed"} & self._wanted or log.last_sequence == self.cursor.blocks:
            self.cursor = self.cursor._replace(blocks=log.last_sequence)
            return
        page = log.read(self.cursor.blocks, _MAX_BATCH)
        self.behind = len(page.events) == _MAX_BATCH
        yield from self._lost(page.lost)
        for event in page.events:
            self.cursor = self.cursor._replace(blocks=event.sequence)
            if event.kind in self._wanted:
                yield _with_id(self.cursor, self._messages.of(event, self._pool))

    def _lost(self, count: int) -> Iterator[bytes]:
        self._num_lost += count
        if count:
            yield _with_id(self.cursor, _message("lost", {"count": count}))


def _encode(event: Entry | BlockEvent, pool: str) -> bytes:
    if isinstance(event, Entry):
        return _message(event.type, event.data)
    data: dict[str, Any] = {"pool": pool, "keys": [format_key(key) for key in event.keys]}
    if event.kind == "removed":
        data["reason"] = event.reason
    return _message(event.kind, data)


def _message(kind: EventType, data: dict[str, Any]) -> bytes:
    """A server-sent event without its id. JSON in ASCII contains no line breaks."""
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def _with_id(cursor: Cursor, message: bytes) -> bytes:
    return b"id: %s\n%s" % (str(cursor).encode(), message)
