"""When the content of each slot was stored and last used, and samples of how long blocks stay."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from math import inf, nextafter
from operator import ge

from kvstow.stats import AgeStats

_SHORT = 8
"""Runs of fewer slots are written one by one: creating a slice takes as long."""
_STRIDE = 61
"""One block in so many is sampled, 2 us for 1,000 blocks. A prime, or it would always sample the same blocks of equally
long prefixes."""


class SlotTimes:
    """Two times of the engine's clock for each slot. Not locked; 16 bytes a slot.

    A run is a `range` of neighbouring slots, or any other sequence of slots. A range is written as a slice, so its cost
    hardly depends on its length.
    """

    __slots__ = ("_lost_at", "_stored_at", "_used_at")

    def __init__(self) -> None:
        self._stored_at = array("d")
        self._used_at = array("d")
        self._lost_at = -inf

    def grow(self, num_slots: int) -> None:
        """Make room for slots below `num_slots`."""
        missing = bytes(8 * max(0, num_slots - len(self._used_at)))
        self._stored_at.frombytes(missing)
        self._used_at.frombytes(missing)

    def stored_at(self, slot: int) -> float:
        return self._stored_at[slot]

    def used_at(self, slot: int) -> float:
        return self._used_at[slot]

    def mark_stored(self, slots: Sequence[int], now: float) -> None:
        """The slots, in ascending order, have new content, which counts as a use, and as stored after any loss even if
        the clock has not moved since."""
        if now <= self._lost_at:
            now = nextafter(self._lost_at, inf)
        stored_at, used_at = self._stored_at, self._used_at
        if len(slots) >= _SHORT and slots[-1] - slots[0] == len(slots) - 1:
            moments = array("d", (now,)) * len(slots)
            stored_at[slots[0] : slots[-1] + 1] = used_at[slots[0] : slots[-1] + 1] = moments
        else:
            for slot in slots:
                stored_at[slot] = used_at[slot] = now

    def mark_used(self, runs: Iterable[Sequence[int]], now: float) -> None:
        """The content of the slots was used."""
        used_at = self._used_at
        for run in runs:
            if len(run) >= _SHORT and isinstance(run, range):
                used_at[run.start : run.stop] = array("d", (now,)) * len(run)
            else:
                for slot in run:
                    used_at[slot] = now

    def mark_lost(self, now: float) -> None:
        """The content of all slots is lost."""
        self._lost_at = max(now, nextafter(self._lost_at, inf))

    def outlived_a_loss(self, slot: int) -> bool:
        """Whether the content of the slot was stored before a loss."""
        return self._stored_at[slot] <= self._lost_at

    def stored_until(self, moment: float, low: int, high: int) -> list[int]:
        """The slots from `low` to below `high` whose content was stored at `moment` or before."""
        return _until(self._stored_at, moment, low, high)

    def used_until(self, moment: float, low: int, high: int) -> list[int]:
        """The slots from `low` to below `high` whose content was last used at `moment` or before."""
        return _until(self._used_at, moment, low, high)


def _until(moments: array[float], moment: float, low: int, high: int) -> list[int]:
    return list(compress(range(low, high), map(ge, repeat(moment), moments[low:high])))


class AgeSampler:
    """Observes the ages of one block in 61. Not locked; each call is O(slots given / 61)."""

    def __init__(self, times: SlotTimes, ages: AgeStats) -> None:
        self._times, self._ages = times, ages
        self._until_evicted = self._until_found = 0
        """How many more blocks to skip before the next sample."""

    def sample_found(self, slots: Sequence[int], now: float) -> None:
        """Blocks were found, and their new use is not noted yet."""
        for slot in slots[self._until_found :: _STRIDE]:
            self._ages.reuse_gap.observe(now - self._times.used_at(slot))
        self._until_found = (self._until_found - len(slots)) % _STRIDE

    def sample_evicted(self, slots: Sequence[int], now: float) -> None:
        """Blocks were evicted for capacity."""
        for slot in slots[self._until_evicted :: _STRIDE]:
            self._ages.lifetime.observe(now - self._times.stored_at(slot))
            self._ages.idle.observe(now - self._times.used_at(slot))
        self._until_evicted = (self._until_evicted - len(slots)) % _STRIDE
