"""The journal: the last events of the server and its engine, for event streams and the status page."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from threading import Lock
from typing import Any, NamedTuple

from kvstow_api.answers import EventType

_KEPT = 1000


class Entry(NamedTuple):
    """`data` includes `time`, as text."""

    sequence: int
    type: EventType
    data: dict[str, Any]


class Journal:
    """The last 1,000 entries, numbered from 1 without gaps. Any thread may write and read."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=_KEPT)
        self._last = 0
        self._lock = Lock()

    @property
    def last(self) -> int:
        """Number of the newest entry; 0 before the first."""
        return self._last

    def add(self, kind: EventType, /, **data: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        with self._lock:
            self._last += 1
            self._entries.append(Entry(self._last, kind, {"time": time, **data}))

    def after(self, sequence: int) -> tuple[list[Entry], int]:
        """Entries above `sequence`, oldest first, and how many of them are no longer kept."""
        with self._lock:
            kept = list(self._entries)
        lost = kept[0].sequence - sequence - 1 if kept else 0
        return [entry for entry in kept if entry.sequence > sequence], max(0, lost)
