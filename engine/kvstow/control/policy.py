"""The order in which evictable slots are evicted.

`RecencyList` keeps slots in the order of their last use. Blocks of a prefix are stored, used and released together, so
they stay neighbours in the list. `remove` and `append` exploit that: a run of slots that is still linked as given costs
two link updates and one check in C (10 ns a slot, instead of 180 ns for relinking one by one).

`EvictionOrder` has such a list for each class of uses, as the multi-queue of Zhou, Philbin and Li has, "The Multi-Queue
Replacement Algorithm for Second Level Buffer Caches", USENIX 2001. What is evicted is one of the lists' coldest slots,
the one with the least worth at that moment. So nothing moves between the lists when `k` or the pool's age changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import compress, count
from math import inf, nextafter
from operator import ne, or_

from kvstow.control.slots import unvisited, values_at
from kvstow.control.uses import LOG_USES, NUM_CLASSES, Uses

NONE = -1
"""End of a list in the link arrays."""


class Links:
    """The link arrays, indexed by slot. Lists that share them must hold disjoint slots."""

    __slots__ = ("colder", "hotter")

    def __init__(self) -> None:
        self.hotter: list[int] = unvisited([])
        self.colder: list[int] = unvisited([])

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
        # Removed slots keep their links: a prefix that was removed as a whole returns as a whole.
        for first, last in reversed(self._linked_runs(slots, removed=True)):  # the first run becomes the hottest
            self._push(slots[first], slots[last])
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

    @property
    def coldest(self) -> int:
        """`NONE` if the list is empty."""
        return self._coldest

    def pop_coldest(self, count: int, used_at: Sequence[float] = (), until: float = inf) -> list[int]:
        """Remove and return up to `count` slots, coldest first: the first one, and those after it up to the first that
        was used after `until`. O(count)."""
        hotter = self._links.hotter
        slots: list[int] = []
        slot = self._coldest
        for _ in range(min(count, self._size)):
            if slots and until < inf and used_at[slot] > until:
                break
            slots.append(slot)
            slot = hotter[slot]
        if slots:
            self._cut(slots[-1], slots[0])
            self._size -= len(slots)
        return slots

    def _linked_runs(self, slots: Sequence[int], *, removed: bool = False) -> list[tuple[int, int]]:
        """The parts of `slots` that are linked as given, each as the indices of its first and last slot. `removed`:
        they are in no list, so a link of one may be older than those of its neighbour."""
        if not slots:
            return []
        rest, front = tuple(slots[1:]), tuple(slots[:-1])
        found = values_at(self._links.hotter, rest)
        if not removed:
            if found == front:
                return [(0, len(slots) - 1)]
            starts = [0, *compress(count(1), map(ne, found, front))]
        else:
            found_colder = values_at(self._links.colder, front)
            if found == front and found_colder == rest:
                return [(0, len(slots) - 1)]
            starts = [0, *compress(count(1), map(or_, map(ne, found, front), map(ne, found_colder, rest)))]
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


_IS_CLASS = tuple(
    bytes(number == other for other in range(NUM_CLASSES)).ljust(256, b"\0") for number in range(NUM_CLASSES)
)


class EvictionOrder:
    """Holds exactly the evictable slots of a namespace. Used under the pool's lock; each call is O(slots given).

    Sequences of slots are in prefix order (root first) without repeats. A leased slot is detached, and returns
    by `attach`. `reclassify` follows each change of the uses of attached slots.
    """

    __slots__ = ("_lists", "_size", "_uses")

    def __init__(self, links: Links, uses: Uses) -> None:
        self._uses = uses
        self._lists = [RecencyList(links) for _ in range(NUM_CLASSES)]
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        """In the order of eviction, as it is now. It must not change meanwhile."""
        ranked = [self._ranked(number) for number, order in enumerate(self._lists) if len(order)]
        return (slot for *_, slot in merge(*ranked))

    def _ranked(self, number: int) -> Iterator[tuple[float, int, int]]:
        used_at, bonus = self._uses.times.used_at, self._uses.scale * LOG_USES[number]
        return ((used_at(slot) + bonus, number, slot) for slot in self._lists[number])

    def attach(self, slots: Sequence[int]) -> None:
        """Add slots; they have just been used."""
        for order, some in self._split(slots):
            order.append(some)
        self._size += len(slots)

    def detach(self, slots: Sequence[int]) -> None:
        """Remove slots that are in use or lose their content."""
        for order, some in self._split(slots):
            order.remove(some)
        self._size -= len(slots)

    def refresh(self, slots: Sequence[int]) -> None:
        """Mark slots as just used: `detach` and `attach` in one."""
        for order, some in self._split(slots):
            order.refresh(some)

    def reclassify(self, slots: Sequence[int], classes: bytes) -> None:
        """Mark slots as just used after their uses have changed. `classes`: those before."""
        if classes == self._uses.classes(slots):
            self.refresh(slots)
            return
        for order, some in self._split(slots, classes):
            order.remove(some)
        for order, some in self._split(slots):
            order.append(some)

    def _split(self, slots: Sequence[int], classes: bytes | None = None) -> Iterator[tuple[RecencyList, Sequence[int]]]:
        """The slots by list. O(slots) for each class that occurs, of which a chain has few."""
        if not slots:
            return
        if classes is None:
            classes = self._uses.classes(slots)
        if classes.count(classes[0]) == len(slots):
            yield self._lists[classes[0]], slots
            return
        for number in set(classes):
            yield self._lists[number], list(compress(slots, classes.translate(_IS_CLASS[number])))

    def next_worth(self) -> float:
        """The worth of the slot that is evicted next; there must be one. O(classes)."""
        return min(self._coldest_by_worth())[0]

    def next_slot(self) -> int:
        """The slot that is evicted next; there must be one. O(classes)."""
        return self._lists[min(self._coldest_by_worth())[1]].coldest

    def _coldest_by_worth(self) -> list[tuple[float, int]]:
        """Worth and class of the coldest slot of each list. Of equal worth, the lower class is evicted first: those
        blocks may depend on the others."""
        used_at, scale = self._uses.times.used_at, self._uses.scale
        return [
            (used_at(order.coldest) + scale * LOG_USES[number], number)
            for number, order in enumerate(self._lists)
            if len(order)
        ]

    def evict(self, count: int) -> list[int]:
        """Remove and return up to `count` slots, to be overwritten. O(count), and O(classes) for each run of slots that
        leaves one list."""
        used_at, scale = self._uses.times.used_times, self._uses.scale
        slots: list[int] = []
        heads = self._coldest_by_worth()
        while len(slots) < count and heads:
            least = min(heads)
            heads.remove(least)
            next_worth, next_class = min(heads, default=(inf, 0))
            number = least[1]
            until = next_worth - scale * LOG_USES[number]
            if number > next_class:
                until = nextafter(until, -inf)
            order = self._lists[number]
            slots += order.pop_coldest(count - len(slots), used_at, until)
            if len(order):
                heads.append((used_at[order.coldest] + scale * LOG_USES[number], number))
        self._size -= len(slots)
        return slots
