"""Blocks that came from the store below the pool, and that no other request has used since: the first to be evicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice


class FetchedSlots:
    """The slots of these blocks. Not locked; each call is O(slots given).

    The store still has such a block, so losing it costs a read, where losing a computed one costs prefill. The request
    for which it was read is no use of it: when that request ends, the block stays where it is. The next use makes it
    a block like any other.

    A slot that is held is not evictable, as everywhere in the index: `detach` and `attach`.
    """

    def __init__(self) -> None:
        self._has_been_used: dict[int, bool] = {}
        """Whether the request that fetched the block has ended."""
        self._evictable: dict[int, None] = {}
        """Those that are not held, the one that is evicted first being the first."""

    def __len__(self) -> int:
        """Those that are evictable."""
        return len(self._evictable)

    def __iter__(self) -> Iterator[int]:
        """The evictable ones, in the order of eviction."""
        return iter(self._evictable)

    def add(self, slots: Iterable[int]) -> None:
        """The blocks of these slots have just been read from the store."""
        for slot in slots:
            self._has_been_used[slot] = False
            self._evictable[slot] = None

    def detach(self, slots: list[int]) -> list[int]:
        """These slots are held from now on. Returns those that are none of these."""
        if not self._has_been_used:
            return slots
        for slot in slots:
            self._evictable.pop(slot, None)
        return self.others(slots)

    def attach(self, slots: list[int]) -> list[int]:
        """These slots are held no more. Returns those that are none of these."""
        if not self._has_been_used:
            return slots
        known = self._has_been_used
        self._evictable.update(dict.fromkeys([slot for slot in slots if slot in known]))
        return self.others(slots)

    def others(self, slots: list[int]) -> list[int]:
        """Those of the slots that are none of these, in the order given."""
        known = self._has_been_used
        return [slot for slot in slots if slot not in known] if known else slots

    def use(self, slots: Sequence[int]) -> list[int]:
        """A request has ended that used these slots. Returns those that are ordinary blocks from now on."""
        known = self._has_been_used
        if not known:
            return []
        leaving = list[int]()
        for slot in slots:
            has_been_used = known.get(slot)
            if has_been_used:
                leaving.append(slot)
            elif has_been_used is not None:
                known[slot] = True
        return self.drop(leaving)

    def drop(self, slots: Iterable[int]) -> list[int]:
        """Those of the slots that are some of these are so no more. Returns them."""
        if not self._has_been_used:
            return []
        dropped = [slot for slot in slots if self._has_been_used.pop(slot, None) is not None]
        for slot in dropped:
            self._evictable.pop(slot, None)
        return dropped

    def evict(self, count: int) -> list[int]:
        """Remove and return up to `count` evictable slots."""
        slots = list(islice(reversed(self._evictable), count))
        return self.drop(slots)
