"""The slots that stores are writing, and the keys that become visible when they are done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class PendingStores:
    """Keys being stored, each with its slot. Not locked; each call is O(keys given).

    A key can be disowned while its slot is written: then it does not become visible, and may be stored in another slot
    at the same time.
    """

    __slots__ = ("_disowned", "_num_slots", "_slot_of")

    def __init__(self) -> None:
        self._slot_of: dict[bytes, int] = {}
        self._disowned: set[int] = set()
        self._num_slots = 0

    def __len__(self) -> int:
        """Slots being written, including those of disowned keys."""
        return self._num_slots

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def isdisjoint(self, keys: Iterable[bytes]) -> bool:
        return self._slot_of.keys().isdisjoint(keys)

    def __iter__(self) -> Iterator[bytes]:
        """The keys that are not disowned."""
        return iter(self._slot_of)

    def slots(self) -> set[int]:
        return {*self._slot_of.values(), *self._disowned}

    def start(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """A store of these keys, none of which is being stored, begins to write the slots."""
        self._slot_of.update(zip(keys, slots, strict=True))
        self._num_slots += len(slots)

    def finish(self, keys: Sequence[bytes], slots: Sequence[int]) -> set[int]:
        """The store that was started with these has ended. Returns the slots whose keys were disowned."""
        self._num_slots -= len(slots)
        disowned = self._disowned.intersection(slots) if self._disowned else set()
        self._disowned -= disowned
        for key, slot in zip(keys, slots, strict=True):
            if slot not in disowned:
                del self._slot_of[key]
        return disowned

    def disown(self, keys: Iterable[bytes]) -> None:
        """Keep those of the keys that are being stored from becoming visible."""
        for key in keys:
            slot = self._slot_of.pop(key, None)
            if slot is not None:
                self._disowned.add(slot)

    def disown_from(self, slot: int) -> None:
        """Disown all keys that are being stored in the slots from `slot` on. O(slots being written)."""
        if slot == 0:
            self._disowned.update(self._slot_of.values())
            self._slot_of.clear()
        else:
            self.disown([key for key, its_slot in self._slot_of.items() if its_slot >= slot])

    def is_consistent(self) -> bool:
        """Whether every slot is counted once. For integrity checks."""
        return len(self._slot_of) + len(self._disowned) == self._num_slots == len(self.slots())
