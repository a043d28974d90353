"""How long blocks stay and when they are used again: of one block in 61."""

from __future__ import annotations

from collections.abc import Sequence

from kvstow.control.index import Index
from kvstow.stats import Histogram

_SECONDS = (0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)
_STRIDE = 61  # 2 us for 1,000 blocks; a prime, or always the same blocks of equally long prefixes would be looked at


class BlockAges:
    """Histograms in seconds. Not locked; each call is O(slots given / 61), with no memory for each slot.

    `lifetime`: from the store of a block to its eviction for room; `idle`: from its last use to that eviction;
    `reuse_gap`: from one use to the next look-up that finds the block.
    """

    def __init__(self) -> None:
        self.lifetime = Histogram(_SECONDS)
        self.idle = Histogram(_SECONDS)
        self.reuse_gap = Histogram(_SECONDS)
        self._until_evicted = self._until_found = 0
        """How many more blocks to pass over before the next that is looked at."""

    def count_found(self, index: Index, slots: Sequence[int], now: float) -> None:
        """Blocks were found, and their new use is not noted yet."""
        for slot in slots[self._until_found :: _STRIDE]:
            self.reuse_gap.observe(now - index.times.used_at(slot))
        self._until_found = (self._until_found - len(slots)) % _STRIDE

    def count_evicted(self, index: Index, slots: Sequence[int], now: float) -> None:
        """Blocks made room for others."""
        for slot in slots[self._until_evicted :: _STRIDE]:
            self.lifetime.observe(now - index.times.stored_at(slot))
            self.idle.observe(now - index.times.used_at(slot))
        self._until_evicted = (self._until_evicted - len(slots)) % _STRIDE
