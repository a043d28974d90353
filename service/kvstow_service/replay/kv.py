"""What the replay needs of the KV caches of all ranks, and the cache of a replay that moves no bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvstow.devices.base import Fence
from kvstow.keys import BlockKey


class Mismatch(NamedTuple):
    """A block on one rank whose bytes are not those of its key."""

    key: BlockKey
    rank: int
    region: int
    block: int


class Verification(NamedTuple):
    """`num_bytes` were looked at, over all ranks; one entry in `mismatches` per wrong block and rank."""

    num_bytes: int
    mismatches: list[Mismatch]


class KVCache(Protocol):
    """The device KV caches of all ranks, used by one thread, block by block.

    Stands in for the model: what it writes for a key is what computing that key's block would have written.
    """

    def compute(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        """Write the bytes of `keys[i]` into block `blocks[i]` on every rank."""

    def verify(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> Verification:
        """Compare every byte of block `blocks[i]` on every rank with those of `keys[i]`."""

    def scrub(self, blocks: Sequence[int]) -> None:
        """Overwrite freed blocks: a store that still reads them, or a load that writes nothing, shows as a mismatch."""

    def fence(self, rank: int) -> Fence | None:
        """What was given to the rank's device so far, and may be under way still; None where nothing can be."""


class NoKV:
    """No cache: for a replay of the control plane alone."""

    def compute(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        """Nothing to write."""

    def verify(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> Verification:
        return Verification(0, [])

    def scrub(self, blocks: Sequence[int]) -> None:
        """Nothing to overwrite."""

    def fence(self, rank: int) -> None:
        """Nothing is ever under way."""


class FreeBlocks:
    """The free list of the KV cache's blocks, which all ranks share. First in, first out, so that a block is
    reused as late as possible, as in an inference engine."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = deque(range(num_blocks))

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, count: int) -> list[int]:
        """`count` free blocks; the caller has seen that there are so many."""
        return [self._blocks.popleft() for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        self._blocks.extend(blocks)
