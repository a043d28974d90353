"""Eviction policies: the order in which evictable slots are evicted.

`RecencyList` keeps slots in the order of their last use. Blocks of a prefix are stored, used and released together, so
they stay neighbours in the list. `remove` and `append` exploit that: a run of slots that is still linked as given costs
two link updates and one check in C (17 ns a slot, instead of 180 ns for relinking one by one).

ARC is that of Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. Blocks used once and
blocks used again are in two lists. Recently evicted keys of either list are remembered as ghosts; a store of such a key
shows which list was too short, and changes the target size of the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, compress, count
from operator import ne, not_
from typing import Protocol

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


class EvictionPolicy(Protocol):
    """Holds exactly the evictable slots. Called under the engine's lock; each call is O(slots given).

    Sequences of slots are in prefix order (root first) without repeats. A leased or protected slot is detached, and
    returns by `attach`.
    """

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """In the order of eviction, as far as it is known in advance."""

    def admit(self, slots: Sequence[int]) -> None:
        """Add slots with new content."""

    def detach(self, slots: Sequence[int]) -> None:
        """Remove slots that are in use or lose their content."""

    def attach(self, slots: Sequence[int]) -> None:
        """Add slots that were detached for use; they have just been used."""

    def new_among(self, slots: Sequence[int]) -> Sequence[int]:
        """Those that were not used since they were stored, if the policy tells them apart; they are not detached."""

    def attach_new(self, slots: Sequence[int]) -> None:
        """Add slots that were detached for something that is no use, and were new before."""

    def use(self, slots: Sequence[int]) -> None:
        """Mark slots as just used: `detach` and `attach` in one."""

    def refresh(self, slots: Sequence[int]) -> None:
        """Evict these slots as late as if they had been stored just now."""

    def evict(self, count: int) -> list[int]:
        """Remove and return up to `count` slots, to be overwritten."""

    def set_capacity(self, num_slots: int) -> None:
        """The pool now has this many slots."""

    def hand_over(self) -> RecencyList:
        """Hand all slots, coldest first, to another policy. O(1)."""

    def forget(self, limit: int) -> bool:
        """Drop up to `limit` remembered keys of evicted blocks; False once there are none. Called without the lock
        after `hand_over`: freeing a million keys at once takes 70 ms."""


class LruPolicy(RecencyList):
    """Evicts the least recently used slot: the coldest of the list."""

    __slots__ = ()
    name = "lru"
    admit = attach = attach_new = RecencyList.append
    detach = RecencyList.remove
    use = RecencyList.refresh
    evict = RecencyList.pop_coldest

    def new_among(self, slots: Sequence[int]) -> Sequence[int]:
        return ()

    def set_capacity(self, num_slots: int) -> None:
        """LRU does not depend on the capacity."""

    def hand_over(self) -> RecencyList:
        return self

    def forget(self, limit: int) -> bool:
        return False


class ArcPolicy:
    """Resists scans: blocks that are used once do not displace blocks that were used twice.

    `key_of[slot]` is the key in a slot, read when slots are admitted and evicted. There is up to one ghost per slot of
    the pool. When the pool shrinks, later calls forget the excess: two ghosts, or four when they evict, for each slot
    given.
    """

    name = "arc"

    def __init__(self, order: RecencyList, links: Links, key_of: Sequence[bytes | None]) -> None:
        self._links = links
        self._key_of = key_of
        self._recent = order
        self._frequent = RecencyList(links)
        self._is_frequent = bytearray(len(key_of))
        self._recent_ghosts: OrderedDict[bytes | None, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[bytes | None, None] = OrderedDict()
        self._capacity = len(key_of)
        self._target = 0.0

    @property
    def num_ghosts(self) -> int:
        """Recently evicted keys that are remembered."""
        return len(self._recent_ghosts) + len(self._frequent_ghosts)

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def __iter__(self) -> Iterator[int]:
        return chain(self._recent, self._frequent)

    def admit(self, slots: Sequence[int]) -> None:
        once: list[int] = []
        again: list[int] = []
        for slot in slots:
            (again if self._recall(self._key_of[slot]) else once).append(slot)
        for slot in again:
            self._is_frequent[slot] = 1
        self._recent.append(once)
        self._frequent.append(again)

    def detach(self, slots: Sequence[int]) -> None:
        once, again = self._by_list(slots)
        self._recent.remove(once)
        self._frequent.remove(again)
        for slot in again:
            self._is_frequent[slot] = 0
        self._trim_ghosts(2 * len(slots))

    def attach(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._is_frequent[slot] = 1
        self._frequent.append(slots)

    def new_among(self, slots: Sequence[int]) -> Sequence[int]:
        return self._by_list(slots)[0]

    def attach_new(self, slots: Sequence[int]) -> None:
        self._recent.append(slots)

    def use(self, slots: Sequence[int]) -> None:
        once, again = self._by_list(slots)
        if once:
            self.detach(slots)
            self.attach(slots)
        else:
            self._frequent.refresh(again)

    def refresh(self, slots: Sequence[int]) -> None:
        once, again = self._by_list(slots)
        self._recent.refresh(once)
        self._frequent.refresh(again)

    def evict(self, count: int) -> list[int]:
        surplus = max(0, len(self._recent) - int(self._target))
        shortfall = max(0, count - len(self._frequent))
        from_recent = self._recent.pop_coldest(min(count, max(surplus, shortfall)))
        from_frequent = self._frequent.pop_coldest(count - len(from_recent))
        for slot in from_recent:
            self._recent_ghosts[self._key_of[slot]] = None
        for slot in from_frequent:
            self._frequent_ghosts[self._key_of[slot]] = None
            self._is_frequent[slot] = 0
        count = len(from_recent) + len(from_frequent)
        self._trim_recent_ghosts(2 * count)
        self._trim_ghosts(2 * count)
        return from_recent + from_frequent

    def set_capacity(self, num_slots: int) -> None:
        missing = len(self._key_of) - len(self._is_frequent)
        if missing > 0:
            self._is_frequent.extend(bytes(missing))
        self._capacity = num_slots
        self._target = min(self._target, float(num_slots))

    def hand_over(self) -> RecencyList:
        self._recent.absorb(self._frequent)
        return self._recent

    def forget(self, limit: int) -> bool:
        for _ in range(min(limit, self.num_ghosts)):
            (self._recent_ghosts or self._frequent_ghosts).popitem()
        return self.num_ghosts > 0

    def _recall(self, key: bytes | None) -> bool:
        """Whether `key` is a ghost. If so, adapt the target size and forget it."""
        recent, frequent = self._recent_ghosts, self._frequent_ghosts
        if key in recent:
            self._target = min(float(self._capacity), self._target + max(1.0, len(frequent) / len(recent)))
            del recent[key]
            return True
        if key in frequent:
            self._target = max(0.0, self._target - max(1.0, len(recent) / len(frequent)))
            del frequent[key]
            return True
        return False

    def _by_list(self, slots: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The slots in the recent list, and those in the frequent one."""
        marks = list(map(self._is_frequent.__getitem__, slots))
        again = marks.count(1)
        if not again:
            return slots, []
        if again == len(slots):
            return [], slots
        return list(compress(slots, map(not_, marks))), list(compress(slots, marks))

    def _trim_recent_ghosts(self, limit: int) -> None:
        """Forget the oldest recent ghosts beyond the capacity left by the recent list, at most `limit`."""
        for _ in range(min(limit, len(self._recent_ghosts) - max(0, self._capacity - len(self._recent)))):
            self._recent_ghosts.popitem(last=False)

    def _trim_ghosts(self, limit: int) -> None:
        """Forget the oldest ghosts beyond the capacity, at most `limit`. A call that evicts adds half as many, so calls
        after a shrink remove the excess."""
        for _ in range(min(limit, self.num_ghosts - self._capacity)):
            (self._frequent_ghosts or self._recent_ghosts).popitem(last=False)
