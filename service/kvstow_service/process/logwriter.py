"""Writes the event loop's log lines on another thread, so that a blocked log cannot block the loop."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator

logger = logging.getLogger("kvstow.server")

_MOST_LINES = 1000
_STOP_SECONDS = 1.0
_LOGGERS = ("kvstow", "uvicorn", "asyncio")


class LogWriter:
    """Between `start` and `stop`, lines logged on the thread that called `start` are written by another thread.

    A handler may block for as long as a pipe is full. Up to 1000 lines wait; further ones are dropped, and `on_drop` is
    called for each. The host keeps its handlers and levels: this is a filter on the loggers that the event loop uses,
    and it lets lines of other threads pass.
    """

    def __init__(self, on_drop: Callable[[], None] = lambda: None) -> None:
        self._on_drop = on_drop
        self._waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(_MOST_LINES)
        self._dropped = 0
        self._guarded: int | None = None
        self._loggers: list[logging.Logger] = []
        self._thread = threading.Thread(target=self._write, name="kvstow-admin-log", daemon=True)

    def start(self) -> None:
        self._guarded = threading.get_ident()
        self._thread.start()
        self._loggers = list(_loggers())
        for one in self._loggers:
            one.addFilter(self._take)

    def stop(self) -> None:
        """Write the waiting lines, for at most one second. Idempotent; does nothing without `start`."""
        for one in self._loggers:
            one.removeFilter(self._take)
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=_STOP_SECONDS)
            self._thread.join(_STOP_SECONDS)

    def _take(self, record: logging.LogRecord) -> bool:
        """A logging filter: True writes the line at once, on this thread."""
        if threading.get_ident() != self._guarded:
            return True
        record.msg, record.args = record.getMessage(), None  # the arguments may change before it is written
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._dropped += 1
            self._on_drop()
        return False

    def _write(self) -> None:
        while (record := self._waiting.get()) is not None:
            logging.getLogger(record.name).handle(record)
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                logger.warning("dropped %d log lines of the admin server: the log is not read fast enough", dropped)


def _loggers() -> Iterator[logging.Logger]:
    """The existing loggers of these families: a filter acts only on the logger that a line is logged with."""
    for name, found in list(logging.root.manager.loggerDict.items()):
        if isinstance(found, logging.Logger) and name.partition(".")[0] in _LOGGERS:
            yield found
