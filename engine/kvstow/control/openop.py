"""An op that some rank has not finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstow.messages import Op, TierOp

if TYPE_CHECKING:
    from kvstow.control.namespaces import Namespace

LAST_RANK = 0
"""The rank whose object a put writes last."""


@dataclass(slots=True)
class OpenOp:
    """An op that some rank has not finished.

    `held`: slots that a load or a put keeps from eviction. `pending`: ranks that have not finished. `reading`: ranks
    that may still read the blocks of a store. `abandoned`: a stuck store or fetch that the host no longer waits for;
    its slots are quarantined until it ends.
    """

    op: Op | TierOp
    namespace: Namespace
    keys: tuple[bytes, ...]
    held: tuple[int, ...]
    request_id: str
    started: float
    pending: set[int]
    reading: set[int] = field(default_factory=set)
    error: str | None = None
    abandoned: bool = False
    stuck: bool = False
    seconds: float = 0.0
    queue_seconds: float = 0.0

    @property
    def fills_slots(self) -> bool:
        """Whether the op writes slots, whose keys are not visible meanwhile."""
        return self.op.direction in ("store", "fetch")


@dataclass(slots=True, kw_only=True)
class OpenTierOp(OpenOp):
    """A put or a fetch. `moved`: leading slots that every rank so far has moved. `waits_for_others`: rank 0 has not
    been given this put yet."""

    tier_op: TierOp
    moved: int
    waits_for_others: bool
    failed: int = 0
    full: bool = False
    outage: bool = False
