"""KV caches whose right content is known: every word follows from key, rank, region and position.

A page that lands at another offset, in another region, rank or block, or that mixes two blocks, differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from kvstow.devices.base import Fence
from kvstow.devices.cuda import CudaFence
from kvstow.keys import BlockKey
from kvstow_service.replay.kv import Mismatch, Verification

_WORD_BYTES = 8
_STEP = 0x1E3779B97F4A7C15  # odd, so that no two of the 2^64 positions share a word
_SCRUB = 0xA5


class PagePattern:
    """Patterns of pages of one size on one device. The page it returns is its own buffer, valid until the next."""

    def __init__(self, page_bytes: int, device: torch.device) -> None:
        words = -(-page_bytes // _WORD_BYTES)  # the last word may be cut: odd tails are checked too
        self._positions = torch.arange(words, dtype=torch.int64, device=device) * _STEP
        self._words = torch.empty_like(self._positions)
        self._page = self._words.view(torch.uint8)[:page_bytes]

    def page(self, key: BlockKey, rank: int, region: int) -> torch.Tensor:
        """The bytes of `key` in that region of that rank, uint8."""
        torch.add(self._positions, _seed(key, rank, region), out=self._words)
        return self._page


class PatternedKV:
    """The KV caches of all ranks: `ranks[r][i]` is region `i` of rank `r`, uint8 `[num_blocks, page_bytes]` with
    any row stride. Work runs on the current stream of the tensors' device."""

    def __init__(self, ranks: Sequence[Sequence[torch.Tensor]]) -> None:
        self._ranks = ranks
        self._patterns = {_shape(region): PagePattern(*_shape(region)) for regions in ranks for region in regions}
        self._block_bytes = sum(region.shape[1] for regions in ranks for region in regions)

    def compute(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        for rank, regions in enumerate(self._ranks):
            for index, region in enumerate(regions):
                pattern = self._patterns[_shape(region)]
                for key, block in zip(keys, blocks, strict=True):
                    region[block].copy_(pattern.page(key, rank, index))

    def verify(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> Verification:
        mismatches = [
            Mismatch(key, rank, wrong, block)
            for rank in range(len(self._ranks))
            for key, block in zip(keys, blocks, strict=True)
            if (wrong := self._wrong_region(key, rank, block)) is not None
        ]
        return Verification(len(blocks) * self._block_bytes, mismatches)

    def fence(self, rank: int) -> Fence | None:
        device = self._ranks[rank][0].device
        return CudaFence.record(torch.cuda.current_stream(device)) if device.type == "cuda" else None

    def _wrong_region(self, key: BlockKey, rank: int, block: int) -> int | None:
        for index, region in enumerate(self._ranks[rank]):
            if not torch.equal(region[block], self._patterns[_shape(region)].page(key, rank, index)):
                return index
        return None

    def scrub(self, blocks: Sequence[int]) -> None:
        for regions in self._ranks:
            for region in regions:
                for block in blocks:
                    region[block].fill_(_SCRUB)


def _shape(region: torch.Tensor) -> tuple[int, torch.device]:
    return region.shape[1], region.device


def _seed(key: BlockKey, rank: int, region: int) -> int:
    place = rank.to_bytes(4, "big") + region.to_bytes(4, "big")
    return int.from_bytes(hashlib.blake2b(key, key=place, digest_size=_WORD_BYTES).digest(), "big", signed=True)
