"""Descriptions of a pool's blocks, for the engines that read its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from kvstow.descriptions import BlockDescription

MOST_BYTES = 32 << 20
"""The limit for the memory of a pool's descriptions, which is that of 65,000 blocks of 16 tokens. Engines read events
ten times a second, so they need only the newest ones."""
_OVERHEAD = 400
"""How many bytes of memory a description takes in addition to its texts. 370 were measured."""


class StoreDescription(NamedTuple):
    """The descriptions that the session `session_id` has sent of the blocks of a store, by slot, and the memory that
    they take."""

    session_id: int
    by_slot: Mapping[int, BlockDescription]
    num_bytes: int


NOT_DESCRIBED = StoreDescription(0, {}, 0)


class Descriptions:
    """The descriptions that engines have sent of their blocks: of the blocks of stores under way, and of the newest
    visible blocks. No other part of the service has a block's tokens. In particular its journal has none, so blocks
    that were recovered or fetched have no description here, and neither have blocks whose description made room for
    newer ones. Used with the pool's lock held. Each call is O(blocks given).
    """

    def __init__(self) -> None:
        self._stores: dict[int, StoreDescription] = {}
        """The descriptions of stores under way by the number of the op, the oldest first."""
        self._blocks: dict[tuple[int, bytes], tuple[int, BlockDescription]] = {}
        """The session that has described each visible block, and the description, by the tag of the namespace and the
        key. The oldest one comes first."""
        self._num_bytes = 0

    def __len__(self) -> int:
        """Return how many blocks have a description, including the blocks of stores under way."""
        return len(self._blocks) + sum(len(each.by_slot) for each in self._stores.values())

    def describe_store(self, op_id: int, session_id: int, by_slot: Mapping[int, BlockDescription]) -> None:
        """Note descriptions of blocks that a store is writing. A later call for the same store adds to them."""
        by_slot = {**self.end_store(op_id).by_slot, **by_slot}
        described = StoreDescription(session_id, by_slot, sum(map(_size, by_slot.values())))
        self._stores[op_id] = described
        self._num_bytes += described.num_bytes
        self._forget_oldest()

    def end_store(self, op_id: int) -> StoreDescription:
        """Forget the descriptions of a store that has ended, and return them."""
        described = self._stores.pop(op_id, NOT_DESCRIBED)
        self._num_bytes -= described.num_bytes
        return described

    def show(self, tag: int, keys: Sequence[bytes], slots: Sequence[int], described: StoreDescription) -> None:
        """Note that blocks of this namespace have become visible in these slots, and keep their descriptions."""
        for key, slot in zip(keys, slots, strict=True):
            if (description := described.by_slot.get(slot)) is not None:
                self._blocks[tag, key] = described.session_id, description
                self._num_bytes += _size(description)

    def drop(self, tag: int, keys: Sequence[bytes]) -> None:
        """Forget the descriptions of blocks that are no longer visible."""
        for key in keys if self._blocks else ():
            if (known := self._blocks.pop((tag, key), None)) is not None:
                self._num_bytes -= _size(known[1])

    def find(self, tag: int, keys: Sequence[bytes], reader: int) -> list[tuple[int, BlockDescription]]:
        """Return the descriptions that sessions other than the `reader` have sent of these blocks, each with the index
        of its key. The reader still has its own."""
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
