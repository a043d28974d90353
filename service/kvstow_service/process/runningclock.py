"""A clock that stands still while this process does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock

logger = logging.getLogger("kvstow.service")

_LONGEST_SECONDS = 3.0
"""Between two looks at the clock by a process that runs: its ticker looks once a second."""


class RunningClock:
    """The monotonic clock, less the time in which this process was stopped (SIGSTOP, a frozen cgroup).

    The process has read no message of others meanwhile, so to count that time would blame them: ranks would be silent,
    and transfers stuck, by the pause of the service. Thread-safe, and it never goes backwards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._last: float | None = None
        """The last look; None until `watch`."""
        self._stopped_seconds = 0.0

    def watch(self) -> None:
        """From now on somebody looks at this clock every second, as long as the process runs."""
        self._last = self._clock()

    def __call__(self) -> float:
        gap = 0.0
        with self._lock:
            now = self._clock()
            if self._last is not None:
                if now - self._last > _LONGEST_SECONDS:
                    gap = now - self._last
                    self._stopped_seconds += gap
                self._last = now
            running = now - self._stopped_seconds
        if gap:
            logger.warning("this process was stopped for %.1f s; that time counts for no timeout", gap)
        return running
