"""Order of eviction: which of the slots that may go goes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvstow.control.recency import RecencyList


class EvictionPolicy(Protocol):
    """Holds exactly the evictable slots. Called under the engine's lock; each call is O(slots given).

    Sequences of slots are in prefix order (root first) without repeats. A slot that is leased or protected is not
    here: it was detached, and comes back by `attach`.
    """

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """In order of eviction, as far as it can be told in advance."""

    def admit(self, slots: Sequence[int]) -> None:
        """New content was stored in these slots."""

    def detach(self, slots: Sequence[int]) -> None:
        """Take these slots out: they are in use, or their content goes."""

    def attach(self, slots: Sequence[int]) -> None:
        """Slots that were detached for use come back: they have just been used."""

    def use(self, slots: Sequence[int]) -> None:
        """These slots, which are here, have just been used: as `detach` and `attach`."""

    def refresh(self, slots: Sequence[int]) -> None:
        """These slots, which are here, go as late as if they had been stored or used last only now."""

    def evict(self, count: int) -> list[int]:
        """Take out up to `count` slots to be overwritten."""

    def set_capacity(self, num_slots: int) -> None:
        """The pool now has this many slots."""

    def hand_over(self) -> RecencyList:
        """Give up all slots, coldest first, in O(1): another policy takes over."""

    def forget(self, limit: int) -> bool:
        """Drop up to `limit` of the keys that it remembers of blocks that are gone; False once there are none. Called
        without the lock, on a policy that has handed over: to free a million keys at once takes 70 ms."""


class LruPolicy:
    """Evicts the slot whose last use is longest ago."""

    name = "lru"

    def __init__(self, order: RecencyList) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def admit(self, slots: Sequence[int]) -> None:
        self._order.append(slots)

    def detach(self, slots: Sequence[int]) -> None:
        self._order.remove(slots)

    def attach(self, slots: Sequence[int]) -> None:
        self._order.append(slots)

    def use(self, slots: Sequence[int]) -> None:
        self._order.refresh(slots)

    def refresh(self, slots: Sequence[int]) -> None:
        self._order.refresh(slots)

    def evict(self, count: int) -> list[int]:
        return self._order.pop_coldest(count)

    def set_capacity(self, num_slots: int) -> None:
        """LRU does not depend on the capacity."""

    def hand_over(self) -> RecencyList:
        return self._order

    def forget(self, limit: int) -> bool:
        return False
