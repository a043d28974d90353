"""The answers about the fleet tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstow.tier.tierstatus import BreakerState, TierCounters, TierState
from kvstow_api.hostedtier import HostedTier


@dataclass(frozen=True, slots=True, kw_only=True)
class TierClientView:
    """A client of the store: a connection, or a process. `state`: `connected`, `connecting` (not yet, or again),
    `failed` (until someone acts) or `closed`; `reason` is empty while connected. `restarts`: how often what connects to
    the store was ended and started again. `corrupt_objects`: those that were fetched and were not what was put."""

    purpose: str
    state: Literal["connected", "connecting", "failed", "closed"]
    reason: str
    restarts: int
    timeouts: int
    corrupt_objects: int
    put_bytes: int
    get_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPoolView:
    """The tier of a namespace of a pool. `state`: `on`, `off` (with the reason), or `down`: the breaker is not closed.
    `fingerprint`: what its objects are known by, null while it is off.

    `decision`: the last one about a fetch, in words, from the three figures above it, which are null until they are
    measured. Of the blocks, `waiting_blocks` are to be put, `putting_blocks` and `fetching_blocks` are under way.
    `dropped_blocks` were to be put, and too many waited or the store was full; `breaker_opened` counts how often it has
    opened.
    """

    pool: str
    namespace: str
    model: str
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
    dropped_blocks: int
    breaker_opened: int
    counters: TierCounters
    clients: list[TierClientView]

    @classmethod
    def of(cls, tier: HostedTier) -> TierPoolView:
        status = tier.status
        return cls(
            pool=tier.pool,
            namespace=tier.namespace,
            model=tier.model,
            fingerprint=tier.fingerprint,
            state=status.state,
            reason=status.reason,
            breaker=status.breaker,
            fetch_bytes_per_second=status.fetch_bytes_per_second,
            lookup_seconds=status.lookup_seconds,
            prefill_tokens_per_second=status.prefill_tokens_per_second,
            decision=status.decision,
            waiting_blocks=status.waiting_blocks,
            putting_blocks=status.putting_blocks,
            fetching_blocks=status.fetching_blocks,
            dropped_blocks=status.dropped_blocks,
            breaker_opened=status.opened,
            counters=status.counters,
            clients=[
                TierClientView(
                    purpose=one.purpose,
                    state=one.health.state,
                    reason=one.health.reason,
                    restarts=one.stats.restarts,
                    timeouts=one.stats.timeouts,
                    corrupt_objects=one.stats.corrupt_objects,
                    put_bytes=one.stats.put_bytes,
                    get_bytes=one.stats.get_bytes,
                )
                for one in tier.clients
            ],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """The fleet tier of the host. `store` and `url` (without secrets) are null without a store."""

    store: str | None
    url: str | None
    items: list[TierPoolView]


NO_TIER = TierView(store=None, url=None, items=[])
"""Of a host without a tier."""
