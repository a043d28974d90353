"""A hash table that says which slot a key is in. It has chains of slots, and never has to be rebuilt.

A `dict` of a million keys takes 85 to 250 ms to grow, or to clean up after deletions, in one C call that keeps every
other thread waiting, and no call makes room in advance. Here a key's hash names a bucket, a bucket the first slot of a
chain, and each slot the next one. A removed slot leaves its chain, and nothing else changes. The number of buckets
follows that of the slots, by linear hashing (Litwin, "Linear Hashing: A New Tool for File and Table Addressing", VLDB
1980): buckets are split one by one, in steps of bounded length.

The hashes are those of `hash(key)`, whose seed is random in each process, so clients cannot choose keys that meet in
one bucket.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

_END, _UNLINKED = -1, -2
_BUCKETS_PER_SLOT = 2
_LEAST_BUCKETS = 64
_SPLIT_AT_ONCE, _MADE_AT_ONCE = 512, 1 << 16
_FEW = 8
"""For at most this many keys, a loop takes less time than one more call of numpy."""

Hashes = npt.NDArray[np.int64]
Slots = npt.NDArray[np.intp]


class SlotTable:
    """Slots by the hashes of the keys that they hold, or are to hold. Not locked; each call is O(slots or keys given).

    Two keys have the same hash once in 2^64 times; the caller compares keys where that matters. The table takes 20 to
    28 bytes for each slot.
    """

    __slots__ = ("_first", "_firsts", "_hash_of", "_hashes", "_mask", "_next", "_nexts", "_num_split", "num_linked")

    def __init__(self) -> None:
        self._first = array("i", (_END,)) * _LEAST_BUCKETS
        """The first slot of each bucket. A bucket above `_mask` is in use once its counterpart in the lower half has
        been split."""
        self._mask = _LEAST_BUCKETS - 1
        self._num_split = 0
        """How many buckets of the lower half were split: each has given some of its slots to one of the upper half."""
        self._next, self._hash_of = array("i"), array("q")
        """For each slot, the next slot of its bucket, and the hash of its key."""
        self.num_linked = 0
        self._view()

    def _view(self) -> None:
        self._firsts = np.frombuffer(self._first, np.int32)
        self._nexts = np.frombuffer(self._next, np.int32)
        self._hashes = np.frombuffer(self._hash_of, np.int64)

    def grow(self, num_slots: int) -> None:
        """Make room for slots below `num_slots`."""
        missing = num_slots - len(self._next)
        if missing > 0:
            del self._firsts, self._nexts, self._hashes  # an array cannot grow while numpy has a view of it
            self._next.extend(array("i", (_UNLINKED,)) * missing)
            self._hash_of.frombytes(bytes(8 * missing))
            self._view()

    def fit(self, num_slots: int) -> Iterator[None]:
        """Make the buckets that a pool of `num_slots` slots needs, and split the buckets that there are,
        `_SPLIT_AT_ONCE` of them between two yields. Every other call can be made between two steps. Only one thread at
        a time may do this."""
        yield from self._make(num_slots)
        while self._mask + 1 < _BUCKETS_PER_SLOT * num_slots:
            while len(self._first) < 2 * (self._mask + 1):
                del self._firsts, self._nexts, self._hashes
                self._first.extend(array("i", (_END,)) * min(_MADE_AT_ONCE, self._mask + 1))
                self._view()
                yield
            end = min(self._num_split + _SPLIT_AT_ONCE, self._mask + 1)
            used = np.flatnonzero(self._firsts[self._num_split : end] >= 0) + self._num_split
            for bucket in used.tolist():
                self._split(bucket)
            self._num_split = end
            if end == self._mask + 1:
                self._mask, self._num_split = 2 * self._mask + 1, 0
            yield

    def _make(self, num_slots: int) -> Iterator[None]:
        """Give a table without slots all its buckets, so that none has to be split."""
        size = 1 << max(1, _BUCKETS_PER_SLOT * num_slots - 1).bit_length()
        if self.num_linked or self._num_split or size <= self._mask + 1:
            return
        first = array("i")
        while len(first) < size:
            first.extend(array("i", (_END,)) * min(_MADE_AT_ONCE, size))
            yield
        if not self.num_linked:
            self._first, self._mask = first, size - 1
            self._view()

    def _split(self, bucket: int) -> None:
        first, following, half = self._first, self._next, self._mask + 1
        slot = first[bucket]
        first[bucket] = _END
        while slot >= 0:
            after = following[slot]
            home = bucket + (self._hash_of[slot] & half)
            following[slot] = first[home]
            first[home] = slot
            slot = after

    def _bucket(self, hashed: int) -> int:
        bucket = hashed & self._mask
        return hashed & (2 * self._mask + 1) if bucket < self._num_split else bucket

    def _buckets(self, hashes: Hashes) -> Hashes:
        buckets: Hashes = hashes & self._mask
        if self._num_split:
            np.copyto(buckets, hashes & (2 * self._mask + 1), where=buckets < self._num_split)
        return buckets

    def get(self, hashed: int) -> int | None:
        """Return a slot of the key with this hash, or None if there is none."""
        slot = self._first[self._bucket(hashed)]
        while slot >= 0:
            if self._hash_of[slot] == hashed:
                return slot
            slot = self._next[slot]
        return None

    def slots(self, hashed: int) -> Iterator[int]:
        """Yield all slots of keys with this hash."""
        slot = self._first[self._bucket(hashed)]
        while slot >= 0:
            if self._hash_of[slot] == hashed:
                yield slot
            slot = self._next[slot]

    def find(self, hashes: Hashes) -> tuple[list[int], list[int]]:
        """Return the indices of the hashes that are in the table, and a slot for each of them."""
        at = self._firsts[self._buckets(hashes)]
        left = np.flatnonzero(at >= 0)
        at, sought = at[left], hashes[left]
        indices: list[int] = []
        slots: list[int] = []
        while len(left) > _FEW:
            same = self._hashes[at] == sought
            indices += left[same].tolist()
            slots += at[same].tolist()
            at = self._nexts[at]
            goes_on = at >= 0
            goes_on &= ~same
            left, at, sought = left[goes_on], at[goes_on], sought[goes_on]
        hash_of, following = self._hash_of, self._next
        for index, slot, hashed in zip(left.tolist(), at.tolist(), sought.tolist(), strict=True):
            while slot >= 0 and hash_of[slot] != hashed:
                slot = following[slot]
            if slot >= 0:
                indices.append(index)
                slots.append(slot)
        return indices, slots

    def link(self, hashes: Hashes, slots: Sequence[int]) -> None:
        """Add these slots, which are in no chain and are to hold the keys with these hashes."""
        rows = np.fromiter(slots, np.intp, len(slots))
        buckets = self._buckets(hashes)
        self._hashes[rows] = hashes
        self._nexts[rows] = self._firsts[buckets]
        self._firsts[buckets] = rows
        last = self._firsts[buckets] == rows
        if not last.all():  # several slots have the same bucket, and only one is its first now
            for bucket, slot in zip(buckets[~last].tolist(), rows[~last].tolist(), strict=True):
                self._next[slot] = self._first[bucket]
                self._first[bucket] = slot
        self.num_linked += len(slots)

    def unlink(self, slots: Sequence[int]) -> None:
        """Remove these slots from their chains, because they do not hold their keys any more."""
        rows = np.fromiter(slots, np.intp, len(slots))
        buckets = self._buckets(self._hashes[rows])
        firsts, nexts = self._firsts, self._nexts
        is_first = firsts[buckets] == rows
        firsts[buckets[is_first]] = nexts[rows[is_first]]
        rest, its = rows[~is_first], buckets[~is_first]
        if len(rest):
            before = firsts[its]
            is_second = nexts[before] == rest
            nexts[before[is_second]] = nexts[rest[is_second]]
            for bucket, slot in zip(its[~is_second].tolist(), rest[~is_second].tolist(), strict=True):
                self._unlink(bucket, slot)
        nexts[rows] = _UNLINKED
        self.num_linked -= len(slots)

    def _unlink(self, bucket: int, slot: int) -> None:
        first, following = self._first, self._next
        at = first[bucket]
        if at == slot:
            first[bucket] = following[slot]
            return
        while following[at] != slot:
            at = following[at]
        following[at] = following[slot]

    def is_linked(self, slot: int) -> bool:
        return self._next[slot] != _UNLINKED
