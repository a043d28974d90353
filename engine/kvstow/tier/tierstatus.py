"""What operators see of the fleet tier."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from kvstow.stats import Exposed
from kvstow.tier.breaker import BreakerState
from kvstow.tier.store import ClientHealth, ClientStats

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
