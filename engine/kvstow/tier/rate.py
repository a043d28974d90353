"""How fast a store is, as measured, and how long a call may take."""

from __future__ import annotations

from collections import deque
from itertools import accumulate

_RECENT = 9
_WEIGHT = 0.2
"""Of the newest measurement."""
_FIRST_GUESS = 50e6
"""Bytes per second, for timeouts before anything was measured."""
_BASE_TIMEOUT = 0.5
_SLOWER = 4.0
"""A call may be so many times slower than the average."""
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
            self.per_second = self._median()

    def _median(self) -> float:
        """Half of all was moved at this rate or a lower one."""
        slowest_first = sorted(self._calls)
        up_to = accumulate(amount for _, amount in slowest_first)
        half = sum(amount for _, amount in slowest_first) / 2
        return next(rate for (rate, _), so_far in zip(slowest_first, up_to, strict=True) if so_far >= half)


class TransferRate:
    """Bytes per second of one direction, as a moving average over calls. Not locked: one thread measures, and any
    thread may read."""

    def __init__(self) -> None:
        self.bytes_per_second: float | None = None
        """None before the first measurement."""

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A call has moved so many bytes."""
        if num_bytes <= 0 or seconds <= 0:
            return
        rate = num_bytes / seconds
        known = self.bytes_per_second
        # Averages times, not rates: one quick call among slow ones must not make all look quick.
        self.bytes_per_second = rate if known is None else 1 / ((1 - _WEIGHT) / known + _WEIGHT / rate)

    def timeout(self, num_bytes: int) -> float:
        """Seconds after which a call that moves so many bytes is given up."""
        seconds = _BASE_TIMEOUT + _SLOWER * num_bytes / (self.bytes_per_second or _FIRST_GUESS)
        return min(_LONGEST_TIMEOUT, seconds)
