"""How often blocks were used, also those that were evicted not long ago, and what that makes them worth.

A use is one request, once, for its whole chain of blocks from the root. A block's worth is the time of its last use,
plus `k` times the age that blocks reach in this pool times the logarithm of its uses. With k = 0 it is the time alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from math import floor, log2

import numpy as np
import numpy.typing as npt

from kvstow.control.slots import SlotKeys, SlotTimes, values_at

Hashes = npt.NDArray[np.uint64]

MOST_USES = 255
"""Further uses are not counted."""
_PER_DOUBLING = 2
"""Classes in which the number of uses doubles: blocks of one class are evicted in the order of their last use."""
CLASSES = bytes(floor(_PER_DOUBLING * log2(max(uses, 1))) for uses in range(MOST_USES + 1))
NUM_CLASSES = max(CLASSES) + 1
LOG_USES = tuple(number / _PER_DOUBLING for number in range(NUM_CLASSES))
"""By class: the logarithm of the uses."""
_ONE_MORE = bytes(min(uses + 1, MOST_USES) for uses in range(MOST_USES + 1))

# -- hashes ------------------------------------------------------------------------------------------------------------

_WORD = 8
_MIX_HEAD, _MIX_TAIL = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_MIX_TAG = 0x94D049BB133111EB
_SHIFT = np.uint64(32)


@cache
def _words_of(width: int) -> np.dtype[np.void]:
    """The first and the last 8 bytes of keys of so many bytes."""
    places = {"names": ["head", "tail"], "formats": ["<u8", "<u8"], "offsets": [0, width - _WORD], "itemsize": width}
    return np.dtype(places)  # type: ignore[call-overload,no-any-return]


def join_keys(keys: Sequence[bytes]) -> tuple[bytes, int]:
    """The keys end to end, and how many bytes each has. Of short keys, and of those of several lengths, the last 8."""
    data, width = b"".join(keys), len(keys[0]) if keys else _WORD
    if width < _WORD or len(data) != len(keys) * width:
        return b"".join([key[-_WORD:].rjust(_WORD, b"\0") for key in keys]), _WORD
    return data, width


def hash_joined(data: bytes, width: int, tag: int = 0) -> Hashes:
    """64 bits for each key of the namespace with the number `tag`, from its first and its last 8 bytes. For `data` and
    `width` see `join_keys`."""
    words = np.frombuffer(data, _words_of(width))
    mixed: Hashes = words["head"] * _MIX_HEAD
    mixed ^= words["tail"]
    if tag:
        mixed ^= np.uint64(tag * _MIX_TAG & (1 << 64) - 1)
    mixed *= _MIX_TAIL
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX_HEAD
    mixed ^= mixed >> _SHIFT
    return mixed


def hash_keys(keys: Sequence[bytes], tag: int = 0) -> Hashes:
    return hash_joined(*join_keys(keys), tag)


def smoothed(age: float | None, new: float, count: float, num_slots: float) -> float:
    """An age smoothed over as many evictions as there are slots, after `count` evictions at the age `new`. `age`: the
    one before; None if there is none."""
    if age is None:
        return max(0.0, new)
    left: float = (1.0 - 1.0 / max(1.0, num_slots)) ** count
    return max(0.0, new + (age - new) * left)


_GHOSTS_PER_SLOT = 4
_LEAST_GHOSTS = 1024
_MOST_EVICTED = 4096
"""Keys that wait to be remembered."""
_COUNT, _TAG_SHIFT, _COUNT_BITS = np.uint32(0xFF), np.uint64(40), np.uint64(8)
_SLICE = 1 << 16
"""Words of a table that are made in one step, which keeps other threads waiting."""

Words = npt.NDArray[np.uint32]


class Ghosts:
    """The uses of keys whose blocks were evicted: for four to eight keys a slot, 4 bytes each. Not locked.

    Each key has one place in the table, by the lower bits of its hash. The next key in that place replaces it. A word
    is the upper 24 bits of the hash with the uses in the lowest byte. So one key in 16 million is taken for the one
    that had its place.
    """

    __slots__ = ("_has_any", "_words")

    def __init__(self) -> None:
        self._words = np.zeros(_LEAST_GHOSTS, np.uint32)
        self._has_any = False

    def __bool__(self) -> bool:
        """Whether there may be any."""
        return self._has_any

    def fit(self, num_slots: int) -> Iterator[None]:
        """Have the table for a pool of so many slots, with what is in the present one. O(slots) if its size changes:
        6 ms for a million, 0.1 ms between two of the yields. Call it without the pool's lock; what is put meanwhile is
        lost. Not for two threads."""
        before, size = self._words, max(_LEAST_GHOSTS, 1 << (_GHOSTS_PER_SLOT * num_slots - 1).bit_length())
        if size <= len(before) <= 2 * size:
            return
        words = np.empty(size, np.uint32)
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

    def put(self, hashes: Hashes, uses: bytes) -> None:
        words = self._words  # once: `fit` may replace it meanwhile
        words[hashes & np.uint64(len(words) - 1)] = _tags(hashes) | np.frombuffer(uses, np.uint8)
        self._has_any = True

    def find(self, hashes: Hashes) -> bytes:
        """The uses of each key; 0 for those that are not known."""
        if not self:
            return bytes(len(hashes))
        words = self._words
        words = words[hashes & np.uint64(len(words) - 1)]
        is_known = (words ^ _tags(hashes)) <= _COUNT
        if not is_known.any():
            return bytes(len(hashes))
        return np.where(is_known, words & _COUNT, 0).astype(np.uint8).tobytes()


def _tags(hashes: Hashes) -> Words:
    return (hashes >> _TAG_SHIFT << _COUNT_BITS).astype(np.uint32)


class Uses:
    """The uses of the blocks of a pool. Not locked; each call is O(slots or keys given).

    Sequences of slots and keys are in prefix order, root first.
    """

    def __init__(self, times: SlotTimes, k: float = 0.0) -> None:
        self.times = times
        self.k = k
        self.age = 0.0
        """How long after its last use a block is evicted: smoothed over as many evictions as there are slots."""
        self._has_aged = False
        self._num_slots = 0
        self._counts = bytearray()
        self._ghosts = Ghosts()
        self._evicted: dict[int, tuple[list[bytes], bytearray]] = {}
        """Keys that are not in the table yet and their uses, by the number of their namespace."""
        self._num_evicted = 0

    @property
    def scale(self) -> float:
        """What a doubling of the uses is worth, in seconds."""
        return self.k * self.age

    def set_num_slots(self, num_slots: int) -> None:
        """The pool has the slots below `num_slots`."""
        self._num_slots = num_slots
        self._counts += bytes(max(0, num_slots - len(self._counts)))

    def make_room(self, num_slots: int) -> None:
        """The pool is to have so many slots: see `make_room_in_slices`. Other threads run between the slices."""
        for _ in self.make_room_in_slices(num_slots):
            time.sleep(0)

    def make_room_in_slices(self, num_slots: int) -> Iterator[None]:
        """See `Ghosts.fit`, which this calls."""
        return self._ghosts.fit(num_slots)

    def counts(self, slots: Sequence[int]) -> bytes:
        """The uses of each slot."""
        return bytes(values_at(self._counts, slots))

    def classes(self, slots: Sequence[int]) -> bytes:
        """The class of each slot, from 0 to `NUM_CLASSES` - 1."""
        return bytes(values_at(self._counts, slots)).translate(CLASSES)

    def admit(self, slots: Sequence[int]) -> None:
        """These slots, in ascending order, have new content. What is known of its uses is looked up with its next
        one."""
        if len(slots) and slots[-1] - slots[0] == len(slots) - 1:
            self._counts[slots[0] : slots[-1] + 1] = bytes(len(slots))
        else:
            for slot in slots:
                self._counts[slot] = 0

    def evict(self, keys: Sequence[bytes], slots: Sequence[int], tag: int) -> None:
        """Remember the uses of what these slots held."""
        uses = bytes(values_at(self._counts, slots))
        if any(uses):
            waiting, counts = self._evicted.setdefault(tag, ([], bytearray()))
            waiting += keys
            counts += uses
            self._num_evicted += len(keys)
            if self._num_evicted >= _MOST_EVICTED:
                self._remember()

    def _remember(self) -> None:
        """Many keys at once cost little more than one."""
        for tag, (keys, uses) in self._evicted.items():
            self._ghosts.put(hash_keys(keys, tag), bytes(uses))
        self._evicted, self._num_evicted = {}, 0

    def recall(self, runs: Sequence[Sequence[int]], slot_keys: SlotKeys, tag: int) -> None:
        """The blocks in these runs of slots are about to be used. Those that are new have the uses of their keys."""
        self._remember()
        if not self._ghosts:
            return
        counts = self._counts
        for run in runs:
            uses = counts[run.start : run.stop] if isinstance(run, range) else bytes(values_at(counts, run))
            if 0 not in uses:
                continue
            new = [slot for slot, each in zip(run, uses, strict=True) if not each]
            keys = [key for slot in new if (key := slot_keys.key_of[slot]) is not None]
            for slot, known in zip(new, self._ghosts.find(hash_keys(keys, tag)), strict=True):
                counts[slot] = known

    def num_unused(self, runs: Sequence[Sequence[int]]) -> int:
        """How many of these slots have content that was not used yet."""
        counts = self._counts
        return sum(
            (counts[run.start : run.stop] if isinstance(run, range) else bytes(values_at(counts, run))).count(0)
            for run in runs
        )

    def note_ages(self, slots: Sequence[int], now: float) -> None:
        """The blocks of these slots were evicted because the pool is full."""
        count = len(slots)
        if not count:
            return
        age = now - sum(values_at(self.times.used_times, slots)) / count
        self.age = smoothed(self.age if self._has_aged else None, age, count, self._num_slots)
        self._has_aged = True

    def count(self, runs: Sequence[Sequence[int]], least: int = 0) -> int:
        """One more use of the blocks in these runs of slots, a chain. Whatever used a block has used all before it, so
        each has at least as many uses as those behind it, even if its own were forgotten. `least`: the uses of the
        block behind them. Returns those of the first block."""
        counts = self._counts
        for run in reversed([run for run in runs if run]):
            before = counts[run.start : run.stop] if isinstance(run, range) else values_at(counts, run)
            uses = bytes(before).translate(_ONE_MORE)
            if uses[-1] < least or uses != bytes(sorted(uses, reverse=True)):
                backwards = accumulate(reversed(uses), lambda behind, own: max(behind, own), initial=least)
                uses = bytes(backwards)[:0:-1]
            least = uses[0]
            if isinstance(run, range):
                counts[run.start : run.stop] = uses
            else:
                for slot, number in zip(run, uses, strict=True):
                    counts[slot] = number
        return least

    def count_absent(self, keys: Sequence[bytes], tag: int) -> None:
        """One more use of keys that have no slot: what is stored under them later has it."""
        self._remember()
        hashes = hash_keys(keys, tag)
        self._ghosts.put(hashes, self._ghosts.find(hashes).translate(_ONE_MORE))
