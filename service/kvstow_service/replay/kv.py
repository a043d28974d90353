"""The KV cache of one rank of a replay.

Every word of a block is computed from key, rank, region and position. So a page is recognized as wrong if it lands at
another offset, in another region, rank or block, or if it mixes two blocks. A key names a prefix of tokens, so every
engine can check blocks that any other engine has stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvstow.bytesize import format_size
from kvstow.errors import InsufficientMemoryError
from kvstow.keys import BlockKey, format_key
from kvstow.layout import KVLayout

WORD_BYTES = 8
WORD_STEP = 0x1E3779B97F4A7C15
"""The difference between neighbouring words of a page. It is odd, so that no two of the 2^64 positions have the same
word."""
SCRUB = 0xA5


class Verification(NamedTuple):
    """How many bytes were compared, and the place of each wrong block on each rank."""

    num_bytes: int
    mismatches: tuple[str, ...]

    @classmethod
    def of_ranks(cls, found: Sequence[Verification]) -> Verification:
        """Combine the results of all ranks."""
        mismatches = tuple(wrong for one in found for wrong in one.mismatches)
        return cls(sum(one.num_bytes for one in found), mismatches)


Page = npt.NDArray[np.uint8]


def seed_of(key: BlockKey, rank: int, region: int) -> int:
    """Return the first word of a page, an unsigned number of 64 bits."""
    place = rank.to_bytes(4, "big") + region.to_bytes(4, "big")
    return int.from_bytes(hashlib.blake2b(key, key=place, digest_size=WORD_BYTES).digest(), "big")


class PagePattern:
    """The contents of pages of one size."""

    def __init__(self, page_bytes: int) -> None:
        words = -(-page_bytes // WORD_BYTES)  # rounded up, because bytes after the last whole word are checked too
        self._positions = np.arange(words, dtype=np.uint64) * np.uint64(WORD_STEP)
        self._words = np.empty_like(self._positions)
        self._page = self._words.view(np.uint8)[:page_bytes]

    def page(self, seed: int) -> Page:
        """Return the page that begins with this word. It is in a buffer that the next call overwrites."""
        np.add(self._positions, np.uint64(seed), out=self._words)
        return self._page


class HostKV:
    """The KV cache of one rank, which one thread uses, block by block. `regions[i]` is region `i`: uint8
    `[num_blocks, page_bytes]` with any row stride.

    It stands in for the model: `write` writes what computing the block of a key would have written.
    """

    def __init__(self, rank: int, regions: Sequence[Page]) -> None:
        self.regions = regions
        self._rank = rank
        self._patterns = {size: PagePattern(size) for size in {region.shape[1] for region in regions}}
        self._block_bytes = sum(region.shape[1] for region in regions)

    @classmethod
    def allocate(cls, rank: int, layout: KVLayout) -> Self:
        """Allocate a cache of zeros, which take memory only where they are written. Raises
        `InsufficientMemoryError`."""
        try:
            return cls(rank, [np.zeros((layout.num_blocks, one.page_bytes), np.uint8) for one in layout.regions])
        except MemoryError as error:
            size = format_size(layout.num_blocks * layout.slot_bytes)
            raise InsufficientMemoryError(f"{size} of KV cache do not fit on the CPU: {error}") from error

    def write(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        """Write the bytes of `keys[i]` into block `blocks[i]`."""
        for index, region in enumerate(self.regions):
            pattern = self._patterns[region.shape[1]]
            for key, block in zip(keys, blocks, strict=True):
                region[block] = pattern.page(seed_of(key, self._rank, index))

    def check(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> Verification:
        """Compare every byte of block `blocks[i]` with the content that belongs to `keys[i]`."""
        mismatches = tuple(
            f"key {format_key(key)} in block {block}, region {wrong} of rank {self._rank}"
            for key, block in zip(keys, blocks, strict=True)
            if (wrong := self._wrong_region(key, block)) is not None
        )
        return Verification(len(blocks) * self._block_bytes, mismatches)

    def _wrong_region(self, key: BlockKey, block: int) -> int | None:
        for index, region in enumerate(self.regions):
            expected = self._patterns[region.shape[1]].page(seed_of(key, self._rank, index))
            if not np.array_equal(region[block], expected):
                return index
        return None

    def scrub(self, blocks: Sequence[int]) -> None:
        """Overwrite freed blocks, so that a store that still reads them, or a load that writes nothing, is noticed as a
        mismatch."""
        for region in self.regions:
            for block in blocks:
                region[block] = SCRUB
