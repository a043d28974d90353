"""What was stored and what was removed, for cache-aware routers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Event:
    """Blocks that became visible, or went. `reason` says why they went (empty for stored ones)."""

    sequence: int
    kind: Literal["stored", "removed"]
    keys: tuple[bytes, ...]
    reason: str


class EventPage(NamedTuple):
    """Events after a cursor. `lost`: how many events before the first one are no longer kept."""

    events: list[Event]
    cursor: int
    lost: int


class EventLog:
    """The last events, numbered from 1 without gaps. Any thread may write and read.

    Each reader keeps its own cursor. One that lags behind the buffer is told how many events it lost.
    """

    def __init__(self, buffer: int) -> None:
        self._events: deque[Event] = deque(maxlen=buffer)
        self._sequence = 0
        self._lock = Lock()

    @property
    def last_sequence(self) -> int:
        return self._sequence

    def add(self, kind: Literal["stored", "removed"], keys: tuple[bytes, ...], reason: str = "") -> None:
        if keys:
            with self._lock:
                self._sequence += 1
                self._events.append(Event(self._sequence, kind, keys, reason))

    def read(self, after: int, limit: int = 1000) -> EventPage:
        """Events numbered above `after`, oldest first, at most `limit`. Use `cursor` as the next `after`."""
        with self._lock:
            kept = tuple(self._events)
        first = kept[0].sequence if kept else after + 1
        lost = max(0, first - after - 1)
        start = max(0, after + 1 - first)
        events = list(islice(kept, start, start + limit))
        return EventPage(events, events[-1].sequence if events else max(after, first - 1), lost)
