"""What operators see of the fleet tier, and the circuit breaker: a store that does not work gets nothing but a probe
now and then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]

PROBE_SECONDS = 5.0
"""Between probes of an open breaker."""
_MAX_FAILURES = 3
"""In a row, of calls that the store answered and that moved less than half of what they should."""


class Breaker:
    """Closed while the store works. An outage opens it, and so do three failures in a row; then only a probe that
    succeeds closes it. What began before it opened has no say. Not locked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.state: BreakerState = "closed"
        self.reason = ""
        """Why it is not closed."""
        self.opened = 0
        """How often it has opened."""
        self._failures = 0
        self._probe_at = 0.0

    @property
    def is_closed(self) -> bool:
        return self.state == "closed"

    def note_success(self) -> None:
        self._failures = 0

    def note_failure(self, reason: str) -> bool:
        """The store answered, and moved too little. True if this opens the breaker."""
        self._failures += 1
        return self._failures >= _MAX_FAILURES and self.note_outage(reason)

    def note_outage(self, reason: str) -> bool:
        """The store gave no answer. True if this opens the breaker."""
        if self.state != "closed":
            return False
        self.state, self.reason = "open", reason
        self.opened += 1
        self._failures = 0
        self._probe_at = self._clock() + PROBE_SECONDS
        return True

    def wants_probe(self) -> bool:
        """Whether a probe is to be sent now; then its result is awaited, and no other one is sent."""
        if self.state != "open" or self._clock() < self._probe_at:
            return False
        self.state = "half_open"
        return True

    def note_probe(self, error: str | None) -> bool:
        """The result of the probe. True if this closes the breaker."""
        if self.state != "half_open":
            return False
        if error is None:
            self.state, self.reason = "closed", ""
            return True
        self.state, self.reason = "open", error
        self._probe_at = self._clock() + PROBE_SECONDS
        return False


TierState = Literal["on", "off", "down"]


@dataclass(slots=True)
class TierCounters:
    """They only grow. `requests`: those that were not wholly in the pool. `cut_waits`: of them, those that went on
    before all that was to come had arrived. `declined_requests`: those for which a fetch did not pay. `saved_seconds`:
    the estimated time to compute what was fetched, 0 until the prefill speed is known. `found_blocks`: blocks that
    the store had and the pool had not. `fetched_blocks`: those that every rank has received."""

    requests: int = 0
    cut_waits: int = 0
    declined_requests: int = 0
    wait_seconds: float = 0.0
    saved_seconds: float = 0.0
    lookups: int = 0
    asked_blocks: int = 0
    found_blocks: int = 0
    fetched_blocks: int = 0
    failed_fetch_blocks: int = 0
    put_blocks: int = 0
    failed_put_blocks: int = 0

    def copy(self) -> TierCounters:
        return replace(self)

    def __add__(self, other: TierCounters) -> TierCounters:
        return TierCounters(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class TierStatus:
    """`state`: `on`, `off` (with the reason), or `down`: the breaker is not closed. `decision`: the last one about a
    fetch, in words. `waiting_blocks` are to be put; `dropped_blocks` were to be, and too many waited or the store was
    full."""

    store: str
    state: TierState
    reason: str
    breaker: BreakerState
    fetch_bytes_per_second: float | None
    lookup_seconds: float | None
    prefill_tokens_per_second: float | None
    decision: str
    putting_blocks: int
    fetching_blocks: int
    waiting_blocks: int
    dropped_blocks: int
    opened: int
    counters: TierCounters
