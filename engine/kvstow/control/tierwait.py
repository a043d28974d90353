"""A request that waits for the fleet tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvstow.control.tierneeds import Needs
from kvstow.tier.lookups import Inquiry


@dataclass(slots=True)
class TierWait:
    """A request that may find more in the tier than in the pool. `first`: how many leading keys the pool has at least.
    `until`: when it continues with what has arrived. `needs`: None where a hit is a leading run of `keys`. `inquiry`:
    what the store is asked for it, and `version` that of the table when it was looked at last. `ops`: the fetches that
    it waits for; those at the end of the list may be over."""

    keys: Sequence[bytes]
    first: int
    began: float
    until: float
    needs: Needs | None = None
    state: Literal["asking", "fetching", "over"] = "asking"
    inquiry: Inquiry | None = None
    version: int = -1
    ops: list[int] = field(default_factory=list)
