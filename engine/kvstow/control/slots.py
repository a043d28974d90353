"""What a pool knows of each slot: whether it is free or held, its key, and when its block was stored and used."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from math import inf, nextafter
from operator import ge, itemgetter
from typing import Literal, TypeVar

import numpy as np

from kvstow.collector import unvisited
from kvstow.control.keytable import SlotTable
from kvstow.errors import InvalidRequestError
from kvstow.stats import AgeStats

_T = TypeVar("_T")

_ABSENT, _FREE, _USED = 0, 1, 2
_SHORT = 8
"""Runs of fewer slots are written one by one: creating a slice takes as long."""
_STRIDE = 61
"""Every 61st block is sampled, which takes 2 us for 1,000 blocks. The number is a prime, because otherwise the same
blocks of equally long prefixes would always be sampled."""


def values_at(values: Sequence[_T], slots: Sequence[int]) -> tuple[_T, ...]:
    """Return the values of these slots. Takes 15 us for 1,000 slots, half as long as with `map`."""
    if len(slots) > 1:
        found: tuple[_T, ...] = itemgetter(*slots)(values)
        return found
    return tuple([values[slot] for slot in slots])


_RETIRE = bytes.maketrans(bytes([_FREE]), bytes([_ABSENT]))
_ENLIST = bytes.maketrans(bytes([_ABSENT]), bytes([_FREE]))


class SlotMap:
    """One byte per slot: absent, free or used. Not locked.

    Slots at or above `limit` leave the service: free ones at once, used ones when they are deallocated. `in_service`
    counts free and used slots, including used ones above the limit.
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

    def allocate(self, count: int, below: int | None = None) -> list[int]:
        """Mark `count` free slots as used, and return them. `count` is at most `free`. With `below`, only free slots
        below it are used, which may be fewer.

        A memchr from the end of the last search finds them, so they are often neighbours, whose copies are merged. It
        passes 1 million used slots in 25 us, which happens only if free slots are rare.
        """
        states, find = self._states, self._states.find
        if below is not None:
            return self._allocate_below(count, below)
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

    def take(self, slots: Sequence[int]) -> None:
        """Mark these free slots as used. Raises `InvalidRequestError`, and changes nothing, if one is not free."""
        states = self._states
        if len(set(slots)) < len(slots):
            raise InvalidRequestError("a slot is named twice")
        for slot in slots:
            if not 0 <= slot < self.limit or states[slot] != _FREE:
                raise InvalidRequestError(f"slot {slot} is not free; allowed: free slots below {self.limit}")
        for slot in slots:
            states[slot] = _USED
        self.free -= len(slots)

    def _allocate_below(self, count: int, below: int) -> list[int]:
        states = self._states
        slots: list[int] = []
        at = 0
        while len(slots) < count:
            at = states.find(_FREE, at, below)
            if at < 0:
                break
            states[at] = _USED
            slots.append(at)
        self.free -= len(slots)
        return slots

    def deallocate(self, slots: Iterable[int]) -> None:
        """Mark used slots as free. Slots above the limit leave the service instead."""
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
        """Make exactly the slots below `limit` usable. O(slots between the limits) bytes at the speed of memcpy."""
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
        """One above the highest used slot. A search from the end, at the speed of memchr."""
        return self._states.rfind(_USED) + 1

    def copy(self) -> SlotMap:
        """Return a copy of the map. O(pool) bytes at the speed of memcpy."""
        other = SlotMap()
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other._states = self._states[:]
        return other

    def is_used(self, slot: int) -> bool:
        return slot < len(self._states) and self._states[slot] == _USED

    def used_slots(self) -> set[int]:
        """Return all used slots, including those above the limit. O(pool): for integrity checks."""
        return {slot for slot, state in enumerate(self._states) if state == _USED}

    def counted(self) -> tuple[int, int]:
        """Count the free slots and the slots in service anew. O(pool): for integrity checks."""
        free = self._states.count(_FREE)
        return free, free + self._states.count(_USED)


class SlotSet:
    """A set of slots. It takes one byte for each slot of the pool, so that it never has to be rebuilt. Not locked."""

    __slots__ = ("_count", "_flags")

    def __init__(self) -> None:
        self._flags = bytearray()
        self._count = 0

    def grow(self, num_slots: int) -> None:
        """Make room for slots below `num_slots`."""
        self._flags += bytes(max(0, num_slots - len(self._flags)))

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: int) -> bool:
        return slot < len(self._flags) and self._flags[slot] == 1

    def add(self, slots: Iterable[int]) -> None:
        flags = self._flags
        for slot in slots:
            self._count += not flags[slot]
            flags[slot] = 1

    def discard(self, slots: Iterable[int]) -> None:
        flags = self._flags
        for slot in slots:
            self._count -= flags[slot]
            flags[slot] = 0

    def leading(self, slots: Sequence[int]) -> int:
        """Return how many of the slots are in the set before the first one that is not."""
        found = bytes(values_at(self._flags, slots)).find(0)
        return len(slots) if found < 0 else found

    def slots(self) -> set[int]:
        """Return the slots in the set. O(pool): for integrity checks."""
        return set(compress(range(len(self._flags)), self._flags))


class RefCounts:
    """Counts the holders of each slot. It takes 4 bytes for each slot of the pool, so that it never has to be rebuilt
    when many are held. Not locked. A call takes 40 ns for each slot.

    A slot that is named twice in one call gets or loses two holders. So slots may be released in other groups than they
    were held in.
    """

    __slots__ = ("_counts", "_num_held")

    def __init__(self) -> None:
        self._counts = np.zeros(0, np.uint32)
        self._num_held = 0

    def grow(self, num_slots: int) -> None:
        """Make room for slots below `num_slots`."""
        missing = num_slots - len(self._counts)
        if missing > 0:
            self._counts = np.concatenate([self._counts, np.zeros(missing, np.uint32)])

    def __len__(self) -> int:
        return self._num_held

    def __contains__(self, slot: int) -> bool:
        return slot < len(self._counts) and bool(self._counts[slot])

    def count(self, slot: int) -> int:
        return int(self._counts[slot])

    def increment(self, slots: list[int]) -> list[int]:
        """Add a holder to each slot. Returns the slots that had none, in the order given."""
        if len(set(slots)) < len(slots):
            return self._add_repeated(slots, up=True)
        rows = np.fromiter(slots, np.intp, len(slots))
        before = self._counts[rows]
        self._counts[rows] = before + np.uint32(1)
        if before.any():
            slots = rows[before == 0].tolist()
        self._num_held += len(slots)
        return slots

    def decrement(self, slots: list[int]) -> list[int]:
        """Take a holder from each slot. Returns the slots that have none left, in the order given."""
        if len(set(slots)) < len(slots):
            return self._add_repeated(slots, up=False)
        rows = np.fromiter(slots, np.intp, len(slots))
        before = self._counts[rows]
        self._counts[rows] = before - (before > 0)
        if (before != 1).any():
            self._num_held -= int(np.count_nonzero(before == 1))
            slots_left: list[int] = rows[before <= 1].tolist()
            return slots_left
        self._num_held -= len(slots)
        return slots

    def _add_repeated(self, slots: list[int], *, up: bool) -> list[int]:
        """Do what `increment` (with `up`) or `decrement` does, for slots of which some are named several times."""
        rows, times = np.unique(np.fromiter(slots, np.intp, len(slots)), return_counts=True)
        before = self._counts[rows]
        after = before + times if up else before - np.minimum(before, times)
        self._counts[rows] = after
        self._num_held += int(np.count_nonzero(after)) - int(np.count_nonzero(before))
        changed = set(rows[(before if up else after) == 0].tolist())
        return [slot for slot in dict.fromkeys(slots) if slot in changed]

    def clear(self, slots: list[int]) -> None:
        """Remove all holders of these slots."""
        rows = np.fromiter(slots, np.intp, len(slots))
        self._num_held -= int(np.count_nonzero(self._counts[rows]))
        self._counts[rows] = 0

    def free_of(self, slots: list[int]) -> list[int]:
        """Return the slots without a holder, in the order given."""
        if not self._num_held:
            return slots
        rows = np.fromiter(slots, np.intp, len(slots))
        is_free = self._counts[rows] == 0
        return slots if is_free.all() else rows[is_free].tolist()

    def slots(self) -> set[int]:
        """Return the slots with a holder. O(pool): for integrity checks."""
        return set(np.flatnonzero(self._counts).tolist())

    def is_consistent(self) -> bool:
        """Whether the number of held slots is right. For integrity checks."""
        return len(self.slots()) == self._num_held


class SlotKeys:
    """The key that each slot of the pool holds. Not locked. Only `KeyMap` changes it.

    `key_of[slot]` is the key in a slot, or None, and `tag_of[slot]` the number of its namespace, which means nothing
    where there is no key. `has_namespaces`: whether there has been more than one namespace. `table` finds the slots by
    key.
    """

    __slots__ = ("has_namespaces", "key_of", "table", "tag_of")

    def __init__(self) -> None:
        self.table = SlotTable()
        self.key_of: list[bytes | None] = unvisited([])
        self.tag_of = array("H")
        self.has_namespaces = False

    @property
    def num_slots(self) -> int:
        """One above the highest slot that has ever existed."""
        return len(self.key_of)

    def grow(self, num_slots: int) -> None:
        """Make room for slots below `num_slots`."""
        missing = max(0, num_slots - len(self.key_of))
        self.table.grow(num_slots)
        self.key_of.extend(repeat(None, missing))
        self.tag_of.frombytes(bytes(self.tag_of.itemsize * missing))

    def between(self, low: int, high: int) -> list[tuple[int, bytes]]:
        """Return the slots from `low` to below `high` that have a visible key, with their keys."""
        return [(slot, key) for slot, key in enumerate(self.key_of[low:high], low) if key is not None]


class SlotTimes:
    """When the content of each slot was stored and last used, on the engine's clock. Not locked. It takes 16 bytes for
    each slot.

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

    @property
    def used_times(self) -> Sequence[float]:
        """`used_at` of all slots. The caller may neither change it nor keep it."""
        return self._used_at

    def mark_stored(self, slots: Sequence[int], now: float) -> None:
        """Note that the slots, in ascending order, have new content, which also counts as a use. The content counts as
        stored after any loss, even if the clock has not moved since the loss."""
        if now <= self._lost_at:
            now = nextafter(self._lost_at, inf)
        stored_at, used_at = self._stored_at, self._used_at
        if len(slots) >= _SHORT and slots[-1] - slots[0] == len(slots) - 1:
            moments = array("d", (now,)) * len(slots)
            stored_at[slots[0] : slots[-1] + 1] = used_at[slots[0] : slots[-1] + 1] = moments
        elif len(slots) >= _SHORT:
            rows = np.fromiter(slots, np.intp, len(slots))
            for times in (stored_at, used_at):
                np.frombuffer(times)[rows] = now
        else:
            for slot in slots:
                stored_at[slot] = used_at[slot] = now

    def mark_used(self, runs: Iterable[Sequence[int]], now: float) -> None:
        """Note that the content of the slots was used."""
        used_at = self._used_at
        for run in runs:
            if len(run) >= _SHORT and isinstance(run, range):
                used_at[run.start : run.stop] = array("d", (now,)) * len(run)
            else:
                for slot in run:
                    used_at[slot] = now

    def mark_lost(self, now: float) -> None:
        """Note that the content of all slots is lost."""
        self._lost_at = max(now, nextafter(self._lost_at, inf))

    def outlived_a_loss(self, slot: int) -> bool:
        """Whether the content of the slot was stored before a loss."""
        return self._stored_at[slot] <= self._lost_at

    def until(self, what: Literal["stored", "used"], moment: float, low: int, high: int) -> list[int]:
        """Return the slots from `low` to below `high` whose content was stored, or last used, at `moment` or before."""
        moments = self._stored_at if what == "stored" else self._used_at
        return list(compress(range(low, high), map(ge, repeat(moment), moments[low:high])))


class AgeSampler:
    """Observes the ages of one block in 61. Not locked; each call is O(slots given / 61)."""

    def __init__(self, times: SlotTimes, ages: AgeStats) -> None:
        self._times, self._ages = times, ages
        self._until_evicted = self._until_found = 0
        """How many more blocks to skip before the next sample."""

    def sample_found(self, slots: Sequence[int], now: float) -> None:
        """Sample blocks that were found. Call it before their new use is noted."""
        for slot in slots[self._until_found :: _STRIDE]:
            self._ages.reuse_gap.observe(now - self._times.used_at(slot))
        self._until_found = (self._until_found - len(slots)) % _STRIDE

    def sample_evicted(self, slots: Sequence[int], now: float) -> None:
        """Sample blocks that were evicted for capacity."""
        for slot in slots[self._until_evicted :: _STRIDE]:
            self._ages.lifetime.observe(now - self._times.stored_at(slot))
            self._ages.idle.observe(now - self._times.used_at(slot))
        self._until_evicted = (self._until_evicted - len(slots)) % _STRIDE
