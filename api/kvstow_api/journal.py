"""The last events of the server and its engine, and rate-limited log lines."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Lock
from typing import Any, NamedTuple

from kvstow_api.answers import EventType

_KEPT = 1000

_INTERVAL_SECONDS = 60.0


class Entry(NamedTuple):
    """An entry. `data` includes `time`, as text."""

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
        """The number of the newest entry, or 0 before the first."""
        return self._last

    def add(self, kind: EventType, /, **data: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        with self._lock:
            self._last += 1
            self._entries.append(Entry(self._last, kind, {"time": time, **data}))

    def after(self, sequence: int) -> tuple[list[Entry], int]:
        """Return the entries above `sequence`, the oldest first, and how many of these are no longer kept."""
        with self._lock:
            kept = list(self._entries)
        lost = kept[0].sequence - sequence - 1 if kept else 0
        return [entry for entry in kept if entry.sequence > sequence], max(0, lost)


class LimitedLog:
    """Writes at most `burst` lines a minute to `logger`. The next line after suppressed ones gives their number.

    Use one object for each kind of event. Not thread-safe.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic, *, burst: int = 1) -> None:
        self._logger = logger
        self._clock = clock
        self._burst = burst
        self._begun = float("-inf")
        self._written = 0
        self._suppressed = 0

    def warning(self, message: str, *args: object) -> None:
        self.log(logging.WARNING, message, *args)

    def log(self, level: int, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        now = self._clock()
        if now - self._begun >= _INTERVAL_SECONDS:
            self._begun, self._written = now, 0
        if self._written >= self._burst:
            self._suppressed += 1
            return
        self._written += 1
        suppressed, self._suppressed = self._suppressed, 0
        if suppressed:
            message, args = message + " (%d more were suppressed)", (*args, suppressed)
        self._logger.log(level, message, *args, exc_info=exc_info)
