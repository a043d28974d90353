"""What operators see of the fleet tier, and the circuit breaker: a store that does not work gets nothing but a probe
now and then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from kvstow.stats import Exposed
from kvstow.tier.store import ClientHealth, ClientStats

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
    """They only grow. `cut_waits` and `declined_requests` are some of the `requests`. `saved_seconds` is 0 until the
    prefill speed is known."""

    requests: Annotated[int, Exposed("tier_requests", "Requests that were not wholly in the pool")] = 0
    cut_waits: Annotated[int, Exposed("tier_cut_waits", "Requests that went on before all fetches had ended")] = 0
    declined_requests: Annotated[int, Exposed("tier_declined_requests", "Requests for which a fetch did not pay")] = 0
    wait_seconds: Annotated[float, Exposed("tier_wait_seconds", "Time that requests waited for the store")] = 0.0
    saved_seconds: Annotated[float, Exposed("tier_saved_seconds", "Estimated time to compute what was fetched")] = 0.0
    lookups: int = 0
    asked_blocks: int = 0
    found_blocks: Annotated[int, Exposed("tier_found_blocks", "Blocks that the store had and the pool had not")] = 0
    fetched_blocks: Annotated[int, Exposed("tier_fetched_blocks", "Blocks fetched on all ranks")] = 0
    failed_fetch_blocks: int = 0
    prefetched_blocks: Annotated[
        int, Exposed("tier_prefetched_blocks", "Blocks that were to be fetched before a request came")
    ] = 0
    put_blocks: Annotated[int, Exposed("tier_put_blocks", "Blocks put by all ranks")] = 0
    failed_put_blocks: int = 0
    dropped_blocks: Annotated[
        int,
        Exposed("tier_dropped_blocks", "Blocks that were not put because too many waited or the store was full"),
    ] = 0
    breaker_opened: Annotated[
        int, Exposed("tier_breaker_opened", "How often the store was left alone because it did not work")
    ] = 0

    def __add__(self, other: TierCounters) -> TierCounters:
        return TierCounters(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class TierClient:
    """One client of the store: a connection, or a process. `purpose`: what for, such as `transfers of rank 0`."""

    purpose: str
    health: ClientHealth
    stats: ClientStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatus:
    """The tier of a namespace. `state`: `on`, `off` (with the reason), or `down`: the breaker is not closed.
    `fingerprint`: what its objects are known by, null while it is off.

    `decision`: the last one about a fetch, in words, from the three figures above it, which are null until they are
    measured. Of the blocks, `waiting_blocks` are to be put, `putting_blocks` and `fetching_blocks` are under way.

    The host adds the pool, the namespace, the model, and the clients; one that several namespaces of a pool use is
    listed with one of them.
    """

    store: str
    pool: str = ""
    namespace: str = ""
    model: str = ""
    fingerprint: str | None
    state: TierState
    reason: str
    breaker: BreakerState
    fetch_bytes_per_second: float | None
    lookup_seconds: float | None
    prefill_tokens_per_second: float | None
    decision: str
    waiting_blocks: int
    putting_blocks: int
    fetching_blocks: int
    counters: TierCounters
    clients: tuple[TierClient, ...] = ()
