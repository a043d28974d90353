"""Protections: the slots that an operator keeps from eviction, and until when."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice
from math import inf

_GROUP = 1024
"""Slots that share one count."""


class Protections:
    """Protected slots and the time at which each protection ends (`inf`: never). Not locked.

    Holds one entry per protected slot, however often its protection is renewed. `add` and `discard` are O(1), apart
    from a memmove over the distinct end times; each protect request adds at most one of those.
    """

    __slots__ = ("_counts", "_end_of", "_ends", "_slots_ending")

    def __init__(self) -> None:
        self._end_of: dict[int, float] = {}
        self._slots_ending: dict[float, dict[int, None]] = {}
        """Slots by end time, each group in the order of `add`; slots protected without an end are not here."""
        self._ends: list[float] = []
        """The keys of `_slots_ending`, sorted."""
        self._counts: dict[int, int] = {}
        """Number of protected slots in each group of 1,024 neighbours."""

    def __len__(self) -> int:
        return len(self._end_of)

    def __contains__(self, slot: int) -> bool:
        return slot in self._end_of

    def end_of(self, slot: int) -> float | None:
        """When the protection ends; None if the slot is not protected."""
        return self._end_of.get(slot)

    def add(self, slot: int, end: float) -> None:
        """Protect a slot until `end`; replaces an earlier protection."""
        self.discard(slot)
        self._end_of[slot] = end
        self._counts[slot // _GROUP] = self._counts.get(slot // _GROUP, 0) + 1
        if end < inf:
            if end not in self._slots_ending:
                self._slots_ending[end] = {}
                insort(self._ends, end)
            self._slots_ending[end][slot] = None

    def discard(self, slot: int) -> bool:
        """End a protection; False if there was none."""
        end = self._end_of.pop(slot, None)
        if end is None:
            return False
        self._counts[slot // _GROUP] -= 1
        if end < inf:
            slots = self._slots_ending[end]
            del slots[slot]
            if not slots:
                del self._slots_ending[end], self._ends[bisect_left(self._ends, end)]
        return True

    def due(self, now: float, limit: int) -> list[int]:
        """Up to `limit` slots whose protections end at or before `now`, earliest end first. Where `limit` cuts a group
        with one end time, the slots added last come, in the order of `add`. O(limit)."""
        found: list[int] = []
        if not self._ends or self._ends[0] > now:
            return found
        for end in self._ends:
            if end > now or len(found) >= limit:
                break
            found += list(islice(reversed(self._slots_ending[end]), limit - len(found)))[::-1]
        return found

    def count_from(self, slot: int) -> int:
        """How many slots from `slot` on are protected. O(pool / 1,024)."""
        group = slot // _GROUP
        above = sum(count for number, count in self._counts.items() if number > group)
        return above + len(self.between(slot, (group + 1) * _GROUP))

    def between(self, low: int, high: int) -> list[int]:
        """The protected slots from `low` to below `high`. O(high - low)."""
        return [slot for slot in range(low, high) if slot in self._end_of]

    def unprotected(self, slots: list[int]) -> list[int]:
        """Those of the slots that are not protected, in the order given."""
        if not self._end_of or self._end_of.keys().isdisjoint(slots):
            return slots
        return [slot for slot in slots if slot not in self._end_of]

    def slots(self) -> set[int]:
        """A copy of the protected slots. O(protections): for integrity checks."""
        return set(self._end_of)

    def is_consistent(self) -> bool:
        """Whether all records agree on which slots are protected. O(protections): for integrity checks."""
        ending = {slot: end for end, slots in self._slots_ending.items() for slot in slots}
        counted = {group: count for group, count in self._counts.items() if count}
        expected: dict[int, int] = {}
        for slot in self._end_of:
            expected[slot // _GROUP] = expected.get(slot // _GROUP, 0) + 1
        return (
            ending == {slot: end for slot, end in self._end_of.items() if end < inf}
            and self._ends == sorted(self._slots_ending)
            and all(self._slots_ending.values())
            and counted == expected
        )
