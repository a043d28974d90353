"""The log of our processes: text, or one JSON object a line. A thread of its own writes it, so that no other thread
waits if the log is not read.

Only the loggers "kvstow", "uvicorn" and "asyncio" are configured; the root logger is left alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

logger = logging.getLogger("kvstow.server")

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}

_MOST_LINES = 1000
"""How many lines may wait to be written. The audit log may have the same number of further ones."""
_STOP_SECONDS = 1.0
"""The limit of each wait in `LogQueue.stop`, in seconds."""
_LINES_OF_MESSAGE, _LIMIT_SECONDS = 100, 60.0
"""How many lines of one message `MessageLimit` lets pass, and in how many seconds."""
_MOST_MESSAGES = 1000
"""How many messages `MessageLimit` counts before it begins anew."""
_LOGGERS = ("kvstow", "uvicorn", "asyncio")
"""The loggers that are configured, together with those below them."""
_AUDIT = "kvstow.audit"
"""The logger whose lines share no limit with others, because a flood of other lines must not hide a change."""


class LogQueue:
    """Lines that wait for a thread, which calls `write` with each. Up to 1000 lines wait, and up to 1000 more of the
    audit log. Further lines are dropped, and `on_drop` is called for each of them. `put` never waits."""

    def __init__(self, write: Callable[[logging.LogRecord], object], on_drop: Callable[[], None]) -> None:
        self.on_drop = on_drop
        self._write_line = write
        self._waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(2 * _MOST_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="kvstow-log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write the waiting lines, for at most one second. Idempotent; does nothing without `start`."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=_STOP_SECONDS)
            self._thread.join(_STOP_SECONDS)

    def put(self, record: logging.LogRecord) -> None:
        record.msg, record.args = record.getMessage(), None  # the arguments may change before it is written
        try:
            if record.name != _AUDIT and self._waiting.qsize() >= _MOST_LINES:
                raise queue.Full
            self._waiting.put_nowait(record)
        except queue.Full:
            self._dropped += 1
            self.on_drop()

    def _write(self) -> None:
        while (record := self._waiting.get()) is not None:
            self._write_line(record)
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                logger.warning("dropped %d log lines: the log is not read fast enough", dropped)


@dataclass(slots=True)
class _Written:
    """How often a message was written since a moment, and how often it was suppressed."""

    since: float
    lines: int = 0
    suppressed: int = 0


class MessageLimit:
    """Lets 100 lines of each message pass in a minute, whatever their arguments. Clients can cause some messages a
    thousand times a second, by attaching and leaving. The next line after suppressed ones gives their number. All debug
    lines and all lines of the audit log pass. Two threads that log at once may be counted as one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._written: dict[tuple[str, str], _Written] = {}

    def passes(self, record: logging.LogRecord) -> bool:
        """Whether the line may be written. Adds the number of suppressed lines before it to the record."""
        if record.levelno <= logging.DEBUG or record.name == _AUDIT:
            return True
        now, message = self._clock(), (record.name, str(record.msg))
        if message not in self._written and len(self._written) >= _MOST_MESSAGES:
            self._written.clear()
        written = self._written.setdefault(message, _Written(now))
        if now - written.since >= _LIMIT_SECONDS:
            written.since, written.lines = now, 0
        if written.lines >= _LINES_OF_MESSAGE:
            written.suppressed += 1
            return False
        written.lines += 1
        if written.suppressed:
            record.msg = f"{record.getMessage()} ({written.suppressed:,} more were suppressed)"
            record.args, written.suppressed = None, 0
        return True


class QueuedLog(logging.Handler):
    """The log of a process of our own. One thread writes the lines of all threads to standard error, as far as
    `MessageLimit` lets them pass.

    It writes to the file descriptor and not to `sys.stderr`, because the interpreter waits at its end for the lock of a
    stream in which a thread hangs.
    """

    def __init__(self, formatter: logging.Formatter, on_drop: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.queue = LogQueue(self._write, on_drop)
        self.queue.start()
        self._limit = MessageLimit()

    def createLock(self) -> None:
        """Make no lock. None is needed, and a thread that is stopped in the middle would keep it."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._limit.passes(record):
                self.queue.put(record)
        except Exception:  # noqa: BLE001 - a line that cannot be formatted
            self.handleError(record)

    def stop(self) -> None:
        """Write the waiting lines, for at most one second. Later lines are lost."""
        self.queue.stop()

    def _write(self, record: logging.LogRecord) -> None:
        try:
            line = memoryview((self.format(record) + "\n").encode("utf-8", "backslashreplace"))
            while line:
                line = line[os.write(2, line) :]
        except Exception:  # noqa: BLE001 - nothing may end the thread: the reader of a pipe may have gone
            self.queue.on_drop()


class LogWriter:
    """The log of the admin server's thread in a host's process. Between `start` and `stop`, lines logged on the thread
    that called `start` are written by another thread.

    The host keeps its handlers and levels: this is a filter on the loggers that the event loop uses, and it lets lines
    of other threads pass.
    """

    def __init__(self, on_drop: Callable[[], None] = lambda: None) -> None:
        self._queue = LogQueue(lambda record: logging.getLogger(record.name).handle(record), on_drop)
        self._guarded: int | None = None
        self._loggers: list[logging.Logger] = []

    def start(self) -> None:
        self._guarded = threading.get_ident()
        self._queue.start()
        self._loggers = list(_loggers())
        for one in self._loggers:
            one.addFilter(self._take)

    def stop(self) -> None:
        """Write the waiting lines, for at most one second. Idempotent; does nothing without `start`."""
        for one in self._loggers:
            one.removeFilter(self._take)
        self._queue.stop()

    def _take(self, record: logging.LogRecord) -> bool:
        """A logging filter: True writes the line at once, on this thread."""
        if threading.get_ident() != self._guarded:
            return True
        self._queue.put(record)
        return False


def _loggers() -> Iterator[logging.Logger]:
    """All existing loggers in or below `_LOGGERS`. Each needs a filter of its own, because a filter acts only on the
    logger with which a line is logged."""
    for name, found in list(logging.root.manager.loggerDict.items()):
        if isinstance(found, logging.Logger) and name.partition(".")[0] in _LOGGERS:
            yield found


class JsonFormatter(logging.Formatter):
    """Writes `time` (UTC), `level`, `logger`, `message`, the fields of `extra`, and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logs(log_format: LogFormat, level: LogLevel) -> QueuedLog:
    """Send the lines of `_LOGGERS` to standard error. A second call replaces the handler of the first. The caller stops
    the returned handler at the end, which writes the last lines."""
    handler = QueuedLog(JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT))
    others = "debug" if level == "debug" else "warning"
    for name, threshold in zip(_LOGGERS, (level, others, others), strict=True):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(threshold.upper())
        logger.propagate = False
    return handler
