"""The circuit breaker: a store that does not work only gets a probe now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]

PROBE_SECONDS = 5.0
"""The time between probes while the breaker is open."""
_MAX_FAILURES = 3
"""How many calls in a row may move less than half of their blocks before the breaker opens."""


class Breaker:
    """It is closed while the store works. An outage opens it, and so do three failures in a row. After that, only a
    probe that succeeds closes it. Calls that began before it opened cannot close it. Not locked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.state: BreakerState = "closed"
        self.reason = ""
        """Why the breaker is not closed."""
        self.opened = 0
        """How often the breaker has opened."""
        self._failures = 0
        self._probe_at = 0.0

    @property
    def is_closed(self) -> bool:
        return self.state == "closed"

    def note_success(self) -> None:
        self._failures = 0

    def note_failure(self, reason: str) -> bool:
        """Note that the store has answered, but has moved too few blocks. Returns whether this opens the breaker."""
        self._failures += 1
        return self._failures >= _MAX_FAILURES and self.note_outage(reason)

    def note_outage(self, reason: str) -> bool:
        """Note that the store has given no answer. Returns whether this opens the breaker."""
        if self.state != "closed":
            return False
        self.state, self.reason = "open", reason
        self.opened += 1
        self._failures = 0
        self._probe_at = self._clock() + PROBE_SECONDS
        return True

    def wants_probe(self) -> bool:
        """Whether to send a probe now. If so, the breaker waits for its result and wants no other probe."""
        if self.state != "open" or self._clock() < self._probe_at:
            return False
        self.state = "half_open"
        return True

    def note_probe(self, error: str | None) -> bool:
        """Take the result of the probe: its error, or None if it has succeeded. Returns whether this closes the
        breaker."""
        if self.state != "half_open":
            return False
        if error is None:
            self.state, self.reason = "closed", ""
            return True
        self.state, self.reason = "open", error
        self._probe_at = self._clock() + PROBE_SECONDS
        return False

    def seconds_to_probe(self) -> float | None:
        """Return the seconds until `wants_probe` may be true; None while the breaker is not open."""
        return max(0.0, self._probe_at - self._clock()) if self.state == "open" else None
