"""Descriptions of a pool's blocks, for the engines that read its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, repeat
from typing import Any

from kvstow.descriptions import BlockDescription, DescribedBlocks

MOST_BYTES = 32 << 20
"""The limit for the memory of a pool's descriptions, which is that of 65,000 blocks of 16 tokens. Engines read events
ten times a second, so they need only the newest ones."""
_OVERHEAD = 400
"""How many bytes of memory a description takes in addition to its texts. 370 were measured."""


_Described = tuple[Any, ...]
"""The session that has described a block, the memory that the description takes, and its fields. It is a plain tuple
because `zip` makes the tuples of a whole store in one call."""
StoreDescription = Mapping[int, _Described]
"""The descriptions of a store's blocks, by slot."""
NOT_DESCRIBED: StoreDescription = {}


class Descriptions:
    """The descriptions that engines have sent of their blocks: of the blocks of stores under way, and of the newest
    visible blocks. No other part of the service has a block's tokens. In particular its journal has none, so blocks
    that were recovered or fetched have no description here, and neither have blocks whose description made room for
    newer ones. Used with the pool's lock held. Each call is O(blocks given).
    """

    def __init__(self) -> None:
        self._stores: dict[int, StoreDescription] = {}
        """The descriptions of stores under way by the number of the op, the oldest first."""
        self._blocks: dict[int, dict[bytes, _Described]] = {}
        """The descriptions of visible blocks by the tag of the namespace and by the key, the oldest of each namespace
        first. A namespace without descriptions is not here."""
        self._num_bytes = 0

    def __len__(self) -> int:
        """Return how many blocks have a description, including the blocks of stores under way."""
        return sum(map(len, self._blocks.values())) + sum(map(len, self._stores.values()))

    def describe_store(self, op_id: int, session_id: int, slots: Sequence[int], blocks: DescribedBlocks) -> None:
        """Note what the blocks that a store of this session is writing to these slots hold. A later call for the same
        store adds to it."""
        sizes = [_OVERHEAD + size for size in blocks.sizes()]
        described = dict(zip(slots, zip(repeat(session_id), sizes, *blocks.columns()), strict=True))
        if known := self.end_store(op_id):
            described = {**known, **described}
        self._stores[op_id] = described
        self._num_bytes += _sum_of(described.values())
        self._forget_oldest()

    def end_store(self, op_id: int) -> StoreDescription:
        """Forget the descriptions of a store that has ended, and return them."""
        described = self._stores.pop(op_id, NOT_DESCRIBED)
        self._num_bytes -= _sum_of(described.values())
        return described

    def show(self, tag: int, keys: Sequence[bytes], slots: Sequence[int], described: StoreDescription) -> None:
        """Note that blocks of this namespace have become visible in these slots, and keep their descriptions."""
        found = {key: block for key, slot in zip(keys, slots, strict=True) if (block := described.get(slot))}
        if found:
            self._blocks.setdefault(tag, {}).update(found)
            self._num_bytes += _sum_of(found.values())

    def drop(self, tag: int, keys: Iterable[bytes]) -> None:
        """Forget the descriptions of blocks that are no longer visible."""
        blocks = self._blocks.get(tag)
        if blocks is not None:
            self._num_bytes -= _sum_of(filter(None, map(blocks.pop, keys, repeat(None))))
            if not blocks:
                del self._blocks[tag]

    def find(self, tag: int, keys: Sequence[bytes], reader: int) -> list[tuple[int, BlockDescription]]:
        """Return the descriptions that sessions other than the `reader` have sent of these blocks, each with the index
        of its key. The reader still has its own."""
        found = enumerate(map(self._blocks.get(tag, {}).get, keys))
        return [(index, BlockDescription(*block[2:])) for index, block in found if block and block[0] != reader]

    def _forget_oldest(self) -> None:
        """Forget descriptions until the rest is within the limit. Visible blocks go first, always the oldest of the
        namespace with the most descriptions. Each 256 of them cost O(namespaces)."""
        while self._num_bytes > MOST_BYTES and self._blocks:
            tag = max(self._blocks, key=lambda tag: len(self._blocks[tag]))
            self.drop(tag, list(islice(self._blocks[tag], 256)))
        while self._num_bytes > MOST_BYTES:
            self.end_store(next(iter(self._stores)))


def _sum_of(described: Iterable[_Described]) -> int:
    return sum([block[1] for block in described])
