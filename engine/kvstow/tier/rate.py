"""How fast a store is, as measured, and how long a call of it may take."""

from __future__ import annotations

from collections import deque

from kvstow.prefill import weighted_median

_RECENT = 9
_FIRST_GUESS = 50e6
"""Bytes per second, for timeouts before anything was measured."""
_BASE_TIMEOUT = 0.5
_SLOWER = 4.0
"""A call may be so many times slower than the recent ones."""
_LONGEST_TIMEOUT = 30.0
"""A few small calls, whose time is latency, must not give a large one minutes."""


class RecentRate:
    """Bytes, or tokens, per second: the median of the last calls, each weighted with its amount. One slow call among
    fast ones does not change it, and neither do small calls, whose time is mostly latency. Not locked."""

    def __init__(self) -> None:
        self._calls: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self.per_second: float | None = None
        """None before the first measurement."""

    def observe(self, amount: int, seconds: float) -> None:
        """A call has moved, or computed, so many."""
        if amount > 0 and seconds > 0:
            self._calls.append((amount / seconds, amount))
            self.per_second = weighted_median(self._calls)

    def timeout(self, amount: int) -> float:
        """Seconds after which a call that moves so many is given up."""
        return min(_LONGEST_TIMEOUT, _BASE_TIMEOUT + _SLOWER * amount / (self.per_second or _FIRST_GUESS))
