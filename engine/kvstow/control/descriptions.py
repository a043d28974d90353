"""Descriptions of a pool's blocks, for the engines that read its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from kvstow.descriptions import BlockDescription

MOST_BYTES = 32 << 20
"""The limit for the memory of a pool's descriptions: those of 65,000 blocks of 16 tokens. Engines read events ten times
a second."""
_OVERHEAD = 400
"""Bytes of memory that a description takes besides its own; 370 were measured."""


class StoreDescription(NamedTuple):
    """What session `session_id` has said of the blocks that a store writes, by slot."""

    session_id: int
    by_slot: Mapping[int, BlockDescription]

    @property
    def num_bytes(self) -> int:
        return sum(_size(each) for each in self.by_slot.values())


NOT_DESCRIBED = StoreDescription(0, {})


class Descriptions:
    """What engines have said of blocks: of those of stores under way, and of the newest visible ones. Nothing else of
    the service has a block's tokens: its journal has none, so nothing is known of blocks that were recovered or
    fetched, nor of those whose description has made room for newer ones. Used with the pool's lock held. Each call is
    O(blocks given).
    """

    def __init__(self) -> None:
        self._stores: dict[int, StoreDescription] = {}
        """By op, the oldest first."""
        self._blocks: dict[tuple[int, bytes], tuple[int, BlockDescription]] = {}
        """By namespace and key: the session that has described it, and the description. The oldest first."""
        self._num_bytes = 0

    def __len__(self) -> int:
        """Described blocks, visible or not."""
        return len(self._blocks) + sum(len(each.by_slot) for each in self._stores.values())

    def describe_store(self, op_id: int, session_id: int, by_slot: Mapping[int, BlockDescription]) -> None:
        """Note what blocks hold that a store is writing. A later call for the same store adds to it."""
        described = StoreDescription(session_id, {**self.end_store(op_id).by_slot, **by_slot})
        self._stores[op_id] = described
        self._num_bytes += described.num_bytes
        self._forget_oldest()

    def end_store(self, op_id: int) -> StoreDescription:
        """The store has ended. Returns what is known of its blocks, and forgets it."""
        described = self._stores.pop(op_id, NOT_DESCRIBED)
        self._num_bytes -= described.num_bytes
        return described

    def show(self, tag: int, keys: Sequence[bytes], slots: Sequence[int], described: StoreDescription) -> None:
        """Blocks of this namespace have become visible, in the slots beside their keys."""
        for key, slot in zip(keys, slots, strict=True):
            if (description := described.by_slot.get(slot)) is not None:
                self._blocks[tag, key] = described.session_id, description
                self._num_bytes += _size(description)

    def drop(self, tag: int, keys: Sequence[bytes]) -> None:
        """These blocks are no longer visible."""
        for key in keys if self._blocks else ():
            if (known := self._blocks.pop((tag, key), None)) is not None:
                self._num_bytes -= _size(known[1])

    def find(self, tag: int, keys: Sequence[bytes], reader: int) -> list[tuple[int, BlockDescription]]:
        """The descriptions of these blocks, each with the index of its key, as far as other sessions than the `reader`
        have described them: a session knows what it has said itself."""
        found: list[tuple[int, BlockDescription]] = []
        for index, key in enumerate(keys if self._blocks else ()):
            if (known := self._blocks.get((tag, key))) is not None and known[0] != reader:
                found.append((index, known[1]))
        return found

    def _forget_oldest(self) -> None:
        while self._num_bytes > MOST_BYTES and self._blocks:
            for place in list(islice(self._blocks, 256)):
                self._num_bytes -= _size(self._blocks.pop(place)[1])
        while self._num_bytes > MOST_BYTES:
            self.end_store(next(iter(self._stores)))


def _size(description: BlockDescription) -> int:
    return _OVERHEAD + description.num_bytes
