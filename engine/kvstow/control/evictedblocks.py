"""What is remembered of blocks that the pool does not have: the part of a chain that each belongs to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstow.control.keyhashes import Hashes

_PER_SLOT = 4
_LEAST = 1 << 18
_TAG = np.uint64(0xFFFFFFFF00000000)
_NUMBER = np.uint64(0xFFFFFFFF)
_SLICE = 1 << 15
"""Words of a table that are made in one step, which keeps other threads waiting."""

Words = npt.NDArray[np.uint64]


class EvictedBlocks:
    """The number of a part for four to eight blocks a slot, 8 bytes each. Not locked.

    Each key has one place in the table, by the lower bits of its hash. The next key in that place replaces it. A word
    is the upper half of the hash, with the part's number in the lower half. So one key in four billion is taken for the
    one that had its place.
    """

    __slots__ = ("_has_any", "_words")

    def __init__(self) -> None:
        self._words = np.zeros(_LEAST, np.uint64)
        self._has_any = False

    def __bool__(self) -> bool:
        """Whether there may be any."""
        return self._has_any

    def fit(self, num_slots: int) -> Iterator[None]:
        """Have the table for a pool of so many slots, with what is in the present one. O(slots) if its size changes:
        0.1 ms between two of the yields. Call it without the pool's lock; what is put meanwhile is lost. Not for two
        threads."""
        before, size = self._words, max(_LEAST, 1 << (_PER_SLOT * num_slots - 1).bit_length())
        if size <= len(before) <= 2 * size:
            return
        words = np.empty(size, np.uint64)
        step = min(_SLICE, size)
        if len(before) < step:
            before = np.resize(before, step)
        # In a larger table, a word is put into each place that its key may have.
        for start in range(0, max(size, len(before)), step):
            some = before[start % len(before) :][:step]
            place = words[start % size :][:step]
            np.copyto(place, some, where=True if start < size else some != 0)
            yield
        self._words = words

    def put(self, hashes: Hashes, numbers: npt.NDArray[np.uint32]) -> None:
        """Remember the part of each key. `numbers` are from 1 on."""
        words = self._words  # once: `fit` may replace it meanwhile
        words[hashes & np.uint64(len(words) - 1)] = (hashes & _TAG) | numbers.astype(np.uint64)
        self._has_any = True

    def find(self, hashes: Hashes) -> npt.NDArray[np.uint64]:
        """The number of each key's part; 0 for those that are not known."""
        words = self._words
        found: Words = words[hashes & np.uint64(len(words) - 1)]
        return np.where((found ^ hashes) & _TAG, np.uint64(0), found & _NUMBER)
