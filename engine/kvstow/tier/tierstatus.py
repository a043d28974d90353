"""What operators see of the fleet tier."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from kvstow.tier.breaker import BreakerState
from kvstow.tier.store import ClientHealth, ClientStats

TierState = Literal["on", "off", "down"]


@dataclass(slots=True)
class TierCounters:
    """They only grow. `requests`: those that were not wholly in the pool. `cut_waits`: of them, those that went on
    before all that was to come had arrived. `declined_requests`: those for which a fetch did not pay. `saved_seconds`:
    the estimated time to compute what was fetched, 0 until the prefill speed is known. `found_blocks`: blocks that
    the store had and the pool had not. `fetched_blocks`: those that every rank has received. `dropped_blocks` were to
    be put, and too many waited or the store was full. `breaker_opened`: how often the breaker has opened."""

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
    dropped_blocks: int = 0
    breaker_opened: int = 0

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
