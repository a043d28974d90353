"""Which slots exist and which of them are free."""

from __future__ import annotations

from collections.abc import Iterable

_ABSENT, _FREE, _USED = 0, 1, 2
_RETIRE = bytes.maketrans(bytes([_FREE]), bytes([_ABSENT]))
_ENLIST = bytes.maketrans(bytes([_ABSENT]), bytes([_FREE]))


class SlotMap:
    """One byte a slot: absent, free or used. Not locked.

    Slots at or above `limit` are on their way out: free ones are gone at once, used ones go when they are
    released. `in_service` counts the free and the used ones, wherever they lie.
    """

    __slots__ = ("_cursor", "_states", "free", "in_service", "leaving", "limit")

    def __init__(self) -> None:
        self._states = bytearray()
        self._cursor = 0
        self.limit = 0
        self.free = 0
        self.in_service = 0
        self.leaving = 0
        """Used slots at or above the limit."""

    def allocate(self, count: int) -> list[int]:
        """`count` free slots, which become used; `count` is at most `free`.

        They are found by a memchr from where the last search ended, neighbours first (copies of neighbours are
        merged). It passes over 1 million used slots in 25 us, and only where free slots are rare but exist.
        """
        states, find = self._states, self._states.find
        at = self._cursor
        slots: list[int] = []
        for _ in range(count):
            at = find(_FREE, at)
            if at < 0:
                at = find(_FREE)
            states[at] = _USED
            slots.append(at)
        self._cursor = at
        self.free -= count
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """Used slots become free, or leave the service if they lie above the limit."""
        states, limit = self._states, self.limit
        kept = left = 0
        for slot in slots:
            if slot < limit:
                states[slot] = _FREE
                kept += 1
            else:
                states[slot] = _ABSENT
                left += 1
        self.free += kept
        self.leaving -= left
        self.in_service -= left

    def set_limit(self, limit: int) -> None:
        """Slots exist below `limit` from now on. O(slots between the limits) bytes at the speed of memcpy."""
        low, high = sorted((limit, self.limit))
        states = self._states
        if limit > len(states):
            states.extend(bytes(limit - len(states)))
        used = states.count(_USED, low, high)
        free_before = states.count(_FREE, low, high)
        growing = limit > self.limit
        states[low:high] = states[low:high].translate(_ENLIST if growing else _RETIRE)
        free_after = high - low - used if growing else 0
        self.free += free_after - free_before
        self.in_service += free_after - free_before
        self.leaving += -used if growing else used
        self.limit = limit

    @property
    def top(self) -> int:
        """No slot at or above it is in use. A search from the end, at the speed of memchr."""
        return self._states.rfind(_USED) + 1

    def used_slots(self) -> set[int]:
        """All used slots, also those on their way out. O(pool): for integrity checks."""
        return {slot for slot, state in enumerate(self._states) if state == _USED}

    def counted(self) -> tuple[int, int]:
        """(free, in service), counted afresh. O(pool): for integrity checks."""
        free = self._states.count(_FREE)
        return free, free + self._states.count(_USED)
