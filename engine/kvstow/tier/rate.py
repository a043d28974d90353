"""How fast a store is, as it was measured, and how long it may take."""

from __future__ import annotations

_WEIGHT = 0.2
"""Of the newest measurement."""
_FIRST_GUESS = 50e6
"""Bytes per second, for timeouts before anything was measured."""
_BASE_TIMEOUT = 0.5
_SLOWER = 4.0
"""A call may be so many times slower than the average."""


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
        return _BASE_TIMEOUT + _SLOWER * num_bytes / (self.bytes_per_second or _FIRST_GUESS)
