"""What operators see of the fleet tier."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from kvstow.tier.breaker import BreakerState

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
