"""Rate-limited log lines, for events that a client can cause a thousand times a second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_INTERVAL_SECONDS = 60.0


class LimitedLog:
    """Writes at most `burst` lines a minute to `logger`. The next line after suppressed ones gives their number.

    One object per kind of event. Not thread-safe: used on one event loop.
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
