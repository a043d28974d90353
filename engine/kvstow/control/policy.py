"""Eviction policies: the order in which evictable slots are evicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvstow.control.recency import RecencyList


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
