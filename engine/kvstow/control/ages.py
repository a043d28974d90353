"""Samples how long blocks stay and when they are used again: one block in 61."""

from __future__ import annotations

from collections.abc import Sequence

from kvstow.control.index import Index
from kvstow.stats import Counters

_STRIDE = 61  # 2 us for 1,000 blocks; a prime, or it would always sample the same blocks of equally long prefixes


class AgeSampler:
    """Observes `lifetime`, `idle` and `reuse_gap` of the counters. Not locked; each call is O(slots given / 61), with
    no memory for each slot."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._until_evicted = self._until_found = 0
        """How many more blocks to skip before the next sample."""

    def sample_found(self, index: Index, slots: Sequence[int], now: float) -> None:
        """Blocks were found, and their new use is not noted yet."""
        for slot in slots[self._until_found :: _STRIDE]:
            self._counters.reuse_gap.observe(now - index.times.used_at(slot))
        self._until_found = (self._until_found - len(slots)) % _STRIDE

    def sample_evicted(self, index: Index, slots: Sequence[int], now: float) -> None:
        """Blocks were evicted for capacity."""
        for slot in slots[self._until_evicted :: _STRIDE]:
            self._counters.lifetime.observe(now - index.times.stored_at(slot))
            self._counters.idle.observe(now - index.times.used_at(slot))
        self._until_evicted = (self._until_evicted - len(slots)) % _STRIDE
