"""A clock that stands still while this process does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import inf
from typing import NamedTuple

logger = logging.getLogger("kvstow.service")

LONGEST_SECONDS = 3.0
"""The longest time between two calls of `watch` in a process that runs. The clock also counts this much of a pause."""


class _Watched(NamedTuple):
    """`stopped`: the seconds that do not count. `until`: the moment from which the clock stands still, unless `watch`
    is called before."""

    stopped: float
    until: float


class RunningClock:
    """The monotonic clock, less the time in which this process was stopped (SIGSTOP, a frozen cgroup).

    A stopped process reads no messages, so counting that time would blame others: ranks would seem silent, and
    transfers stuck, because the service itself had stopped.

    One thread calls `watch` every second. If a call is overdue, the clock stands still until it comes, so that threads
    which continue before that see no jump. Any thread may read the clock, which takes no lock and never goes backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watched = _Watched(0.0, inf)
        """Replaced as a whole, so that no reader finds half of a change."""

    def watch(self) -> None:
        """Note that the process runs. After the first call, it must be called every second."""
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
