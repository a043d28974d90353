"""The KV caches of a replay, of one rank and of all in a process.

Every word of a block follows from key, rank, region and position. A page that lands at another offset, in another
region, rank or block, or that mixes two blocks, differs. A key names a prefix of tokens, so every engine can check what
any other has stored.
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


class Verification(NamedTuple):
    """`num_bytes` were looked at; `mismatches` has the place of each wrong block on each rank."""

    num_bytes: int
    mismatches: tuple[str, ...]

    @classmethod
    def of_ranks(cls, found: Sequence[Verification]) -> Verification:
        """What all ranks have found together."""
        mismatches = tuple(wrong for one in found for wrong in one.mismatches)
        return cls(sum(one.num_bytes for one in found), mismatches)


Page = npt.NDArray[np.uint8]

WORD_BYTES = 8
WORD_STEP = 0x1E3779B97F4A7C15
"""Between the words of a page. Odd, so that no two of the 2^64 positions share a word."""
SCRUB = 0xA5


def seed_of(key: BlockKey, rank: int, region: int) -> int:
    """The first word of a page; 64 bits, unsigned."""
    place = rank.to_bytes(4, "big") + region.to_bytes(4, "big")
    return int.from_bytes(hashlib.blake2b(key, key=place, digest_size=WORD_BYTES).digest(), "big")


class PagePattern:
    """Patterns of pages of one size."""

    def __init__(self, page_bytes: int) -> None:
        words = -(-page_bytes // WORD_BYTES)  # rounded up: the bytes after the last whole word are checked too
        self._positions = np.arange(words, dtype=np.uint64) * np.uint64(WORD_STEP)
        self._words = np.empty_like(self._positions)
        self._page = self._words.view(np.uint8)[:page_bytes]

    def page(self, seed: int) -> Page:
        """In a buffer of its own, valid until the next call."""
        np.add(self._positions, np.uint64(seed), out=self._words)
        return self._page


class HostKV:
    """The KV cache of one rank, used by one thread, block by block: `regions[i]` is region `i`, uint8
    `[num_blocks, page_bytes]` with any row stride.

    Stands in for the model: what it writes for a key is what computing that key's block would have written.
    """

    def __init__(self, rank: int, regions: Sequence[Page]) -> None:
        self.regions = regions
        self._rank = rank
        self._patterns = {size: PagePattern(size) for size in {region.shape[1] for region in regions}}
        self._block_bytes = sum(region.shape[1] for region in regions)

    @classmethod
    def allocate(cls, rank: int, layout: KVLayout) -> Self:
        """Of zeros, which are not resident before they are written. Raises `InsufficientMemoryError`."""
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
        """Compare every byte of block `blocks[i]` with those of `keys[i]`."""
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
        """Overwrite freed blocks: a store that still reads them, or a load that writes nothing, shows as a mismatch."""
        for region in self.regions:
            for block in blocks:
                region[block] = SCRUB


class LocalKV:
    """The KV caches of ranks in this process, or of none; `RemoteRanks` has those of other processes."""

    is_verifying = False
    """Whether a rank has yet to report what it found."""

    def __init__(self, ranks: Sequence[HostKV]) -> None:
        self._ranks = ranks
        self._found: list[Verification] = []

    def compute(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        for rank in self._ranks:
            rank.write(keys, blocks)

    def verify(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        self._found.append(Verification.of_ranks([rank.check(keys, blocks) for rank in self._ranks]))

    def scrub(self, blocks: Sequence[int]) -> None:
        for rank in self._ranks:
            rank.scrub(blocks)

    def take_verifications(self) -> list[Verification]:
        """What all ranks have found together, for each call of `verify` since the last call of this, in order."""
        found, self._found = self._found, []
        return found
