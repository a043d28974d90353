"""A clock that stands still until it is told to go on."""

from __future__ import annotations


class FakeClock:
    """Stands in for `time.monotonic`; seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
