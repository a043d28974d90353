"""A clock that stands still while this process does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import inf
from typing import NamedTuple

logger = logging.getLogger("kvstow.service")

LONGEST_SECONDS = 3.0
"""Between two calls of `watch` in a process that runs. As much of a pause is counted."""


class _Watched(NamedTuple):
    """`stopped`: the seconds that do not count. `until`: where the clock stands still if nobody watches again."""

    stopped: float
    until: float


class RunningClock:
    """The monotonic clock, less the time in which this process was stopped (SIGSTOP, a frozen cgroup).

    The process has read no message of others meanwhile, so to count that time would blame them: ranks would be silent,
    and transfers stuck, by the pause of the service.

    One thread calls `watch` every second. If it is overdue, the clock stands still until it calls again, so the threads
    that go on before it see no jump. Any thread may look at the clock, which takes no lock and never goes backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watched = _Watched(0.0, inf)
        """Replaced whole, so that no look finds half of it."""

    def watch(self) -> None:
        """The process runs. Call it every second once it was called."""
        stopped, until = self._watched
        now = self._clock()
        pause = max(0.0, now - until)
        self._watched = _Watched(stopped + pause, now + LONGEST_SECONDS)
        if pause:
            logger.warning("this process was stopped for %.1f s; that counts for no timeout", pause + LONGEST_SECONDS)

    def __call__(self) -> float:
        stopped, until = self._watched
        now = self._clock()
        return (now if now < until else until) - stopped
