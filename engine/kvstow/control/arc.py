"""ARC (Megiddo, Modha: "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003) over slots.

Blocks used once and blocks used again are in two lists. Recently evicted keys of either list are remembered as ghosts;
a store of such a key shows which list was too short, and changes the target size of the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, compress
from operator import not_

from kvstow.control.recency import Links, RecencyList


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
