"""Which key of which namespace is in which slot."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import compress, count, repeat
from operator import ne

_SHORT = 8
"""Fewer keys are looked up one by one: to compare slices takes as long."""


class SlotKeys:
    """What each slot of the pool holds. Not locked. Read-only, except for `KeyMap`.

    `key_of[slot]` is the key in a slot, or None, and `tag_of[slot]` the number of its namespace, which means nothing
    where there is no key. `has_namespaces`: there has been more than one.
    """

    __slots__ = ("has_namespaces", "key_of", "tag_of")

    def __init__(self) -> None:
        self.key_of: list[bytes | None] = []
        self.tag_of = array("H")
        self.has_namespaces = False

    @property
    def num_slots(self) -> int:
        """One above the highest slot that has ever existed."""
        return len(self.key_of)

    def grow(self, num_slots: int) -> None:
        """Make room for slots below `num_slots`."""
        missing = max(0, num_slots - len(self.key_of))
        self.key_of.extend(repeat(None, missing))
        self.tag_of.frombytes(bytes(self.tag_of.itemsize * missing))

    def between(self, low: int, high: int) -> list[tuple[int, bytes]]:
        """(slot, key) of the visible keys in the slots from `low` to below `high`."""
        return [(slot, key) for slot, key in enumerate(self.key_of[low:high], low) if key is not None]


class KeyMap:
    """The visible keys of one namespace, and their slots. Not locked; each call is O(keys or slots given)."""

    __slots__ = ("_own_tags", "_slot_keys", "_slot_of", "_tag")

    def __init__(self, slot_keys: SlotKeys, tag: int) -> None:
        self._slot_keys = slot_keys
        self._tag = tag
        self._slot_of: dict[bytes, int] = {}
        self._own_tags = b""
        """The bytes of `tag_of` for a run of slots of this namespace, as long as the longest run that was compared."""

    def __len__(self) -> int:
        """Visible keys."""
        return len(self._slot_of)

    def leading_runs(self, keys: Sequence[bytes]) -> list[Sequence[int]]:
        """Slots of the keys up to the first that is not visible, as runs of neighbours; for a few keys, as one list.

        Blocks of a prefix are mostly in neighbouring slots (see `place_store`). Then comparing keys slot by slot reads
        memory in order and computes no hash: a lookup among a million slots is three times as fast as with the
        dictionary alone.
        """
        key_of, slot_of = self._slot_keys.key_of, self._slot_of
        if len(keys) < _SHORT:
            few: list[int] = []
            for key in keys:
                slot = slot_of.get(key)
                if slot is None:
                    break
                few.append(slot)
            return [few] if few else []
        runs: list[Sequence[int]] = []
        at, last, last_slot = 0, len(keys) - 1, len(key_of) - 1
        while at <= last:
            slot = slot_of.get(keys[at])
            if slot is None:
                break
            run = 1
            if at < last and slot < last_slot and key_of[slot + 1] == keys[at + 1]:
                run = self._run_length(keys, at, slot)
                if self._slot_keys.has_namespaces:
                    run = self._length_of_own(slot, run)
            runs.append(range(slot, slot + run))
            at += run
        return runs

    def _run_length(self, keys: Sequence[bytes], at: int, slot: int) -> int:
        """How many keys from `at` on are in the slots from `slot` on; the first two are."""
        run = window = 2
        while run == window and at + run < len(keys):  # the whole window matched: try one four times as long
            window = min(4 * window, len(keys) - at)
            wanted, found = keys[at + run : at + window], self._slot_keys.key_of[slot + run : slot + window]
            same = wanted == found  # three times as fast as the search for a difference
            run = window if same else next(compress(count(run), map(ne, wanted, found)), run + len(found))
        return run

    def _length_of_own(self, slot: int, length: int) -> int:
        """How many of the slots from `slot` on, the first of which is of this namespace, are: equal keys of another one
        may follow."""
        tags = self._slot_keys.tag_of[slot : slot + length]
        found = tags.tobytes()  # bytes are compared ten times as fast as arrays
        if len(found) > len(self._own_tags):
            self._own_tags = array("H", (self._tag,)).tobytes() * length
        if self._own_tags.startswith(found):
            return length
        return next(at for at, tag in enumerate(tags) if tag != self._tag)

    def present_runs(self, keys: Sequence[bytes]) -> list[Sequence[int]]:
        """Slots of all visible keys in the order given, as runs of neighbours where possible."""
        runs: list[Sequence[int]] = [*self.leading_runs(keys)]
        rest = sum(map(len, runs)) + 1  # the key before `rest` is not visible
        if rest < len(keys):
            runs.append([slot for slot in self.slots_of(keys[rest:]) if slot is not None])
        return runs

    def slots_of(self, keys: Iterable[bytes]) -> list[int | None]:
        return list(map(self._slot_of.get, keys))

    def put(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Make keys visible, each in its slot, which has no key. Slots are in ascending order."""
        key_of, slot_of = self._slot_keys.key_of, self._slot_of
        for key, slot in zip(keys, slots, strict=True):
            slot_of[key] = slot
            key_of[slot] = key
        if slots and self._slot_keys.has_namespaces:
            self._tag_slots(slots)

    def _tag_slots(self, slots: Sequence[int]) -> None:
        tag_of, tag = self._slot_keys.tag_of, self._tag
        if slots[-1] - slots[0] == len(slots) - 1:  # they are in ascending order
            tag_of[slots[0] : slots[-1] + 1] = array("H", (tag,)) * len(slots)
        else:
            for slot in slots:
                tag_of[slot] = tag

    def take(self, slots: Iterable[int]) -> list[bytes]:
        """Remove the keys in these slots, each of which has one."""
        key_of, slot_of = self._slot_keys.key_of, self._slot_of
        keys: list[bytes] = []
        for slot in slots:
            key = key_of[slot]
            assert key is not None
            keys.append(key)
            key_of[slot] = None
            del slot_of[key]
        return keys

    def slots(self) -> set[int]:
        """The slots with a visible key. O(pool): for integrity checks."""
        return set(self._slot_of.values())

    def defects(self) -> list[str]:
        """Inconsistencies. O(pool): for integrity checks."""
        tag_of = self._slot_keys.tag_of
        pairs = enumerate(self._slot_keys.key_of)
        visible = {slot for slot, key in pairs if key is not None and tag_of[slot] == self._tag}
        if visible != self.slots() or len(visible) != len(self._slot_of):
            return ["keys by slot and slots by key differ"]
        if any(self._slot_keys.key_of[slot] != key for key, slot in self._slot_of.items()):
            return ["a key's slot names another key"]
        return []
