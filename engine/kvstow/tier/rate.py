"""How fast a store is, as measured, and how long a call of it may take."""

from __future__ import annotations

from collections import deque

from kvstow.prefill import weighted_median

_RECENT = 9
_FIRST_GUESS = 50e6
"""The assumed rate for timeouts before the first measurement, in bytes per second."""
_BASE_TIMEOUT = 0.5
_SLOWER = 4.0
"""How many times slower than the recent calls a call may be."""
_LONGEST_TIMEOUT = 30.0
"""The longest timeout, in seconds. The time of small calls is mostly latency, so their rate would give a large call
minutes."""


class RecentRate:
    """Bytes, or tokens, per second: the median of the last calls, each weighted with its amount. One slow call among
    fast ones does not change it, and neither do small calls, whose time is mostly latency. Not locked."""

    def __init__(self) -> None:
        self._calls: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self.per_second: float | None = None
        """The rate. None before the first measurement."""

    def observe(self, amount: int, seconds: float) -> None:
        """Note that a call has moved or computed `amount` in this time."""
        if amount > 0 and seconds > 0:
            self._calls.append((amount / seconds, amount))
            self.per_second = weighted_median(self._calls)

    def timeout(self, amount: int) -> float:
        """Return after how many seconds a call that moves `amount` is given up."""
        return min(_LONGEST_TIMEOUT, _BASE_TIMEOUT + _SLOWER * amount / (self.per_second or _FIRST_GUESS))
