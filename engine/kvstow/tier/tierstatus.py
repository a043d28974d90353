"""What operators see of the store below a pool."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Final, Literal

from kvstow.stats import Exposed

TIER_FAILED: Final = "tier_failed: an unexpected error, which the log has; restart the service"
"""Why a pool uses no store after a defect."""

TierState = Literal["on", "off", "down"]


@dataclass(slots=True)
class TierCounters:
    """What the store below a pool has done for a namespace. The figures only grow. `cut_waits` and `declined_requests`
    are some of the `requests`. `saved_seconds` is 0 until the prefill speed is known."""

    requests: Annotated[int, Exposed("tier_requests", "Requests that were not wholly in the pool")] = 0
    cut_waits: Annotated[int, Exposed("tier_cut_waits", "Requests that went on before all reads had ended")] = 0
    declined_requests: Annotated[int, Exposed("tier_declined_requests", "Requests for which a read did not pay")] = 0
    wait_seconds: Annotated[float, Exposed("tier_wait_seconds", "Time that requests waited for the store")] = 0.0
    saved_seconds: Annotated[float, Exposed("tier_saved_seconds", "Estimated time to compute what was read")] = 0.0
    found_blocks: Annotated[int, Exposed("tier_found_blocks", "Blocks that the store had and the pool had not")] = 0
    read_blocks: Annotated[int, Exposed("tier_read_blocks", "Blocks read from the store, with all their ranks")] = 0
    failed_read_blocks: int = 0
    hit_blocks: Annotated[
        int, Exposed("tier_hit_blocks", "Blocks that requests hit because they were read from the store for them")
    ] = 0
    prefetched_blocks: Annotated[
        int, Exposed("tier_prefetched_blocks", "Blocks that were to be read before a request came")
    ] = 0
    written_blocks: Annotated[int, Exposed("tier_written_blocks", "Blocks written to the store")] = 0
    failed_write_blocks: int = 0
    postponed_blocks: Annotated[
        int,
        Exposed(
            "tier_postponed_blocks",
            "Blocks that are written at their next use only, as too much was waiting to be written",
        ),
    ] = 0

    def __add__(self, other: TierCounters) -> TierCounters:
        return TierCounters(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatus:
    """How a namespace of a pool uses the store below the pool. `state`: `on`, `off` (with the reason), or `down`: no
    part of the store is `on`. `fingerprint`: names its blocks in the store; null while it is off.

    `decision`: the last decision about a read, in words. It is made from the two figures above it, which are null until
    they are known. `writing_blocks` and `reading_blocks`: how many blocks are under way.
    """

    store: str
    pool: str
    namespace: str
    model: str
    fingerprint: str | None
    state: TierState
    reason: str
    read_seconds: float | None
    prefill_tokens_per_second: float | None
    decision: str
    writing_blocks: int
    reading_blocks: int
    stuck_slots: int
    counters: TierCounters
