"""An intrusive doubly linked list of slots, in order of their last use.

Blocks of a prefix are stored, used and released together, so they stay neighbours in the list. `remove` and `append`
exploit that: a run of slots that is still linked as given costs two link updates and one check in C (17 ns a slot,
instead of 180 ns for relinking one by one).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, count
from operator import ne

NONE = -1
"""End of a list in the link arrays."""


class Links:
    """The link arrays, indexed by slot. Lists that share them must hold disjoint slots."""

    __slots__ = ("colder", "hotter")

    def __init__(self) -> None:
        self.hotter: list[int] = []
        self.colder: list[int] = []

    def grow(self, num_slots: int) -> None:
        """Make room for slots below `num_slots`."""
        missing = num_slots - len(self.hotter)
        if missing > 0:
            self.hotter.extend([NONE] * missing)
            self.colder.extend([NONE] * missing)


class RecencyList:
    """Slots from the coldest to the hottest. Not locked.

    Sequences of slots are in prefix order, root first, without repeats. The first becomes the hottest, so that a prefix
    outlives its continuations.
    """

    __slots__ = ("_coldest", "_hottest", "_links", "_size")

    def __init__(self, links: Links) -> None:
        self._links = links
        self._coldest = self._hottest = NONE
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        """Coldest first. The list must not change meanwhile."""
        hotter = self._links.hotter
        slot = self._coldest
        while slot != NONE:
            yield slot
            slot = hotter[slot]

    def append(self, slots: Sequence[int]) -> None:
        """Add slots that are in no list, as the hottest. O(n)."""
        if not slots:
            return
        hotter, colder = self._links.hotter, self._links.colder
        first, last = slots[0], slots[-1]
        rest, front = slots[1:], slots[:-1]
        # Removed slots keep their links: a prefix that was removed as a whole returns as a whole.
        if list(map(hotter.__getitem__, rest)) != front or list(map(colder.__getitem__, front)) != rest:
            for near, far in zip(front, rest, strict=True):
                hotter[far] = near
                colder[near] = far
        self._push(first, last)
        self._size += len(slots)

    def remove(self, slots: Sequence[int]) -> None:
        """Remove slots that are in this list. O(n)."""
        for first, last in self._linked_runs(slots):
            self._cut(slots[first], slots[last])
        self._size -= len(slots)

    def refresh(self, slots: Sequence[int]) -> None:
        """Make slots that are in this list the hottest: `remove` and `append` in one pass. O(n)."""
        for first, last in reversed(self._linked_runs(slots)):  # the first run comes last: it becomes the hottest
            self._cut(slots[first], slots[last])
            self._push(slots[first], slots[last])

    def pop_coldest(self, count: int) -> list[int]:
        """Remove and return up to `count` slots, coldest first. O(count)."""
        hotter = self._links.hotter
        slots: list[int] = []
        slot = self._coldest
        for _ in range(min(count, self._size)):
            slots.append(slot)
            slot = hotter[slot]
        if slots:
            self._cut(slots[-1], slots[0])
            self._size -= len(slots)
        return slots

    def absorb(self, hotter_list: RecencyList) -> None:
        """Move all slots of `hotter_list`, which shares the links, above the hottest slot. O(1)."""
        if not hotter_list._size:
            return
        if self._size:
            self._links.hotter[self._hottest] = hotter_list._coldest
            self._links.colder[hotter_list._coldest] = self._hottest
        else:
            self._coldest = hotter_list._coldest
        self._hottest = hotter_list._hottest
        self._size += hotter_list._size
        hotter_list._coldest = hotter_list._hottest = NONE
        hotter_list._size = 0

    def _linked_runs(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """The parts of `slots` that are linked as given, each as the indices of its first and last slot."""
        if not slots:
            return []
        found = list(map(self._links.hotter.__getitem__, slots[1:]))
        if found == slots[:-1]:
            return [(0, len(slots) - 1)]
        starts = [0, *compress(count(1), map(ne, found, slots))]
        return list(zip(starts, [*(start - 1 for start in starts[1:]), len(slots) - 1], strict=True))

    def _push(self, hot: int, cold: int) -> None:
        """Insert the linked run from `hot` to `cold` above the hottest slot."""
        hotter, colder = self._links.hotter, self._links.colder
        hotter[hot] = NONE
        colder[cold] = self._hottest
        if self._hottest == NONE:
            self._coldest = cold
        else:
            hotter[self._hottest] = cold
        self._hottest = hot

    def _cut(self, hot: int, cold: int) -> None:
        """Remove the linked run from `hot` to `cold`; it keeps its inner links."""
        hotter, colder = self._links.hotter, self._links.colder
        above, below = hotter[hot], colder[cold]
        if above == NONE:
            self._hottest = below
        else:
            colder[above] = below
        if below == NONE:
            self._coldest = above
        else:
            hotter[below] = above
