"""Events as a stream that can be taken up again where it broke off."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Collection, Iterator
from typing import Any, NamedTuple, Self

from kvstow.control.engine import OffloadEngine
from kvstow.keys import format_key
from kvstow_api.journal import Journal
from kvstow_api.streamlimit import StreamLimit
from kvstow_api.views.events import EventView

MAX_STREAMS, RESERVED_STREAMS, STREAMS_PER_CLIENT = 32, 8, 16
POLL_SECONDS = 0.25  # a look at two counters; a call from under the engine's lock would cost every store more
_SILENT_POLLS = 60  # then a comment is sent, so that a client knows that the server is there
_MAX_BATCH = 100  # block events read at once
_RETRY_MS = 2000

_CURSOR = re.compile(r"([0-9a-f]{1,32})-(\d{1,18})-(\d{1,18})")


class Cursor(NamedTuple):
    """How far a reader is: in which life of the engine, in the journal, and in the engine's events."""

    engine_id: str
    journal: int
    blocks: int

    def __str__(self) -> str:
        return "-".join(map(str, self))

    def is_before(self, other: Cursor) -> bool:
        """Whether a reader that was here can come to `other`."""
        return self.engine_id == other.engine_id and self.journal <= other.journal and self.blocks <= other.blocks

    @classmethod
    def parse(cls, text: str) -> Self | None:
        match = _CURSOR.fullmatch(text)
        return None if match is None else cls(match[1], int(match[2]), int(match[3]))


class EventStreams:
    """The streams of one server, each with its own cursor. Used on the event loop."""

    def __init__(self, engine: OffloadEngine, journal: Journal) -> None:
        self._engine, self._journal = engine, journal
        self.limit = StreamLimit(
            "event streams", most=MAX_STREAMS, reserved=RESERVED_STREAMS, per_client=STREAMS_PER_CLIENT
        )
        """Whoever sends a stream holds a place of this."""
        self.lost = 0
        """Events that were no longer kept when a stream came to them."""

    def open(
        self, wanted: Collection[str], *, after: str | None = None, recent: int = 0, poll: float = POLL_SECONDS
    ) -> AsyncIterator[bytes]:
        """The stream from the event with id `after` on, or from `recent` journal entries ago."""
        now = Cursor(self._engine.engine_id, self._journal.last, self._engine.events.last_sequence)
        begin, known = now._replace(journal=max(0, now.journal - recent)), True
        if after is not None:
            given = Cursor.parse(after)
            known = given is not None and given.is_before(now)
            begin = given if given is not None and known else now._replace(journal=0)
        return self._run(_Reader(self._engine, self._journal, frozenset(wanted), begin), known, poll)

    async def _run(self, reader: _Reader, known: bool, poll: float) -> AsyncIterator[bytes]:
        yield f"retry: {_RETRY_MS}\n\n".encode()
        if not known:
            yield _format(EventView(id=str(reader.cursor), type="lost", data={"count": None}))
        silent = 0
        while True:
            chunk = b"".join(map(_format, reader.read()))
            self.lost += reader.take_lost()
            silent = 0 if chunk else silent + 1
            if chunk:
                yield chunk
            elif silent % _SILENT_POLLS == 0:
                yield b": nothing happened\n\n"
            if not reader.behind:
                await asyncio.sleep(poll)


class _Reader:
    """Reads both logs, from a cursor on."""

    def __init__(self, engine: OffloadEngine, journal: Journal, wanted: frozenset[str], cursor: Cursor) -> None:
        self._engine, self._journal, self._wanted = engine, journal, wanted
        self.cursor = cursor
        self._num_lost = 0
        self.behind = False
        """There is more to read at once."""

    def read(self) -> Iterator[EventView]:
        yield from self._read_journal()
        yield from self._read_blocks()

    def take_lost(self) -> int:
        """How many events were lost since the last call."""
        lost, self._num_lost = self._num_lost, 0
        return lost

    def _read_journal(self) -> Iterator[EventView]:
        if self._journal.last == self.cursor.journal:
            return
        entries, lost = self._journal.after(self.cursor.journal)
        yield from self._lost(lost)
        for entry in entries:
            self.cursor = self.cursor._replace(journal=entry.sequence)
            if entry.type in self._wanted:
                yield EventView(id=str(self.cursor), type=entry.type, data=entry.data)

    def _read_blocks(self) -> Iterator[EventView]:
        log = self._engine.events
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
                data: dict[str, Any] = {"keys": [format_key(key) for key in event.keys]}
                if event.kind == "removed":
                    data["reason"] = event.reason
                yield EventView(id=str(self.cursor), type=event.kind, data=data)

    def _lost(self, count: int) -> Iterator[EventView]:
        self._num_lost += count
        if count:
            yield EventView(id=str(self.cursor), type="lost", data={"count": count})


def _format(event: EventView) -> bytes:
    """As server-sent events are written; JSON in ASCII has no line ends."""
    return f"id: {event.id}\nevent: {event.type}\ndata: {json.dumps(event.data)}\n\n".encode()
