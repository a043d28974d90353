"""A table that remembers to which part of a chain each evicted block belongs, so that its return can be observed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstow.control.keyhashes import Hashes

_PER_SLOT = 4
"""The least number of words in the table for each slot of the pool."""
_LEAST = 1 << 18
"""The least number of words in the table, so that a small pool remembers many blocks for each slot."""
_TAG = np.uint64(0xFFFFFFFF00000000)
"""The bits of a word that distinguish the keys which share its place."""
_NUMBER = np.uint64(0xFFFFFFFF)
"""The bits of a word that are the number of a part."""
_SLICE = 1 << 15
"""How many words `fit` copies in one step. Other threads wait for the interpreter meanwhile."""

Words = npt.NDArray[np.uint64]


class EvictedBlocks:
    """Remembers the number of the part of each evicted block, for four to eight blocks a slot, in 8 bytes each. Not
    locked.

    The lower bits of a key's hash choose its only place in the table. Another key that is put into the same place
    replaces it, so the table forgets without being swept. The word in that place has the upper half of the key's hash
    in its upper half, and the number of the part in its lower half. So one unknown key in four billion is mistaken for
    the key that has its place.
    """

    __slots__ = ("_has_any", "_words")

    def __init__(self) -> None:
        self._words = np.zeros(_LEAST, np.uint64)
        self._has_any = False

    def __bool__(self) -> bool:
        """Whether a block may be remembered."""
        return self._has_any

    def fit(self, num_slots: int) -> Iterator[None]:
        """Resize the table for a pool of `num_slots` slots, and keep what it remembers. O(slots) if the size of the
        table changes. Each step up to the next yield takes 0.1 ms. Call it without the pool's lock, and from one thread
        at a time. Blocks that other threads put meanwhile may be forgotten."""
        before, size = self._words, max(_LEAST, 1 << (_PER_SLOT * num_slots - 1).bit_length())
        if size <= len(before) <= 2 * size:
            return
        words = np.empty(size, np.uint64)
        step = min(_SLICE, size)
        if len(before) < step:
            before = np.resize(before, step)
        # A larger table chooses the place by more bits of the hash, which a word does not have. So each word is put
        # into every place that its key may have there.
        for start in range(0, max(size, len(before)), step):
            some = before[start % len(before) :][:step]
            place = words[start % size :][:step]
            np.copyto(place, some, where=True if start < size else some != 0)
            yield
        self._words = words

    def put(self, hashes: Hashes, numbers: npt.NDArray[np.uint32]) -> None:
        """Remember the number of each key's part. The numbers are at least 1, because 0 stands for an unknown key."""
        words = self._words  # read only once, because `fit` may replace the table meanwhile
        words[hashes & np.uint64(len(words) - 1)] = (hashes & _TAG) | numbers.astype(np.uint64)
        self._has_any = True

    def find(self, hashes: Hashes) -> npt.NDArray[np.uint64]:
        """Return the number of each key's part, or 0 if the key is not remembered."""
        words = self._words
        found: Words = words[hashes & np.uint64(len(words) - 1)]
        return np.where((found ^ hashes) & _TAG, np.uint64(0), found & _NUMBER)
