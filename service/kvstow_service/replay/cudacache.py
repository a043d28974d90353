"""The KV cache of a replay on a GPU, in torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstow.bytesize import format_size
from kvstow.config import CopyStrategy
from kvstow.devices.base import Fence
from kvstow.devices.cuda import CudaDevice, CudaFence, CudaOptions, CudaRegistrar, DriverUnavailableError
from kvstow.devices.cuda.driver import load_driver
from kvstow.errors import InsufficientMemoryError
from kvstow.keys import BlockKey
from kvstow.layout import KVLayout
from kvstow_service.replay.kv import Mismatch, Verification
from kvstow_service.replay.pattern import SCRUB, WORD_BYTES, WORD_STEP, seed_of
from kvstow_service.replay.rankcache import RankCache


class _PagePattern:
    """As `PagePattern`, with the page on a device. Its 64-bit words are signed and wrap around."""

    def __init__(self, page_bytes: int, device: torch.device) -> None:
        words = -(-page_bytes // WORD_BYTES)
        self._positions = torch.arange(words, dtype=torch.int64, device=device) * WORD_STEP
        self._words = torch.empty_like(self._positions)
        self._page = self._words.view(torch.uint8)[:page_bytes]

    def page(self, seed: int) -> torch.Tensor:
        torch.add(self._positions, seed - (seed >> 63 << 64), out=self._words)
        return self._page


class TensorKV:
    """The KV cache of one rank: `regions[i]` is region `i`, uint8 `[num_blocks, page_bytes]` with any row stride. Work
    runs on the current stream of the tensors' device."""

    def __init__(self, rank: int, regions: Sequence[torch.Tensor]) -> None:
        self._rank, self._regions = rank, regions
        self._device = regions[0].device
        sizes = {region.shape[1] for region in regions}
        self._patterns = {size: _PagePattern(size, self._device) for size in sizes}
        self._block_bytes = sum(region.shape[1] for region in regions)

    def write(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        for index, region in enumerate(self._regions):
            pattern = self._patterns[region.shape[1]]
            for key, block in zip(keys, blocks, strict=True):
                region[block].copy_(pattern.page(seed_of(key, self._rank, index)))

    def check(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> Verification:
        mismatches = tuple(
            Mismatch(key, self._rank, wrong, block)
            for key, block in zip(keys, blocks, strict=True)
            if (wrong := self._wrong_region(key, block)) is not None
        )
        return Verification(len(blocks) * self._block_bytes, mismatches)

    def _wrong_region(self, key: BlockKey, block: int) -> int | None:
        for index, region in enumerate(self._regions):
            page = self._patterns[region.shape[1]].page(seed_of(key, self._rank, index))
            if not torch.equal(region[block], page):
                return index
        return None

    def scrub(self, blocks: Sequence[int]) -> None:
        for region in self._regions:
            for block in blocks:
                region[block].fill_(SCRUB)

    def fence(self) -> Fence | None:
        return CudaFence.record(torch.cuda.current_stream(self._device)) if self._device.type == "cuda" else None


def make_cuda_cache(rank: int, layout: KVLayout, strategy: CopyStrategy) -> RankCache:
    """See `make_cache`. Ranks take the GPUs in turn."""
    load_driver()
    if not torch.cuda.is_available():
        raise DriverUnavailableError(f"torch {torch.__version__} sees no GPU, or was built without CUDA")
    ordinal = rank % torch.cuda.device_count()
    registrar, options = CudaRegistrar(ordinal), CudaOptions(strategy=strategy)
    regions = _allocate(layout, torch.device("cuda", ordinal))
    return RankCache(
        layout,
        TensorKV(rank, regions),
        registrar,
        lambda pool: CudaDevice(pool, layout, regions, registrar=registrar, options=options),
        registrar.numa_node,
    )


def _allocate(layout: KVLayout, device: torch.device) -> list[torch.Tensor]:
    try:
        return [
            torch.zeros((layout.num_blocks, region.page_bytes), dtype=torch.uint8, device=device)
            for region in layout.regions
        ]
    except torch.OutOfMemoryError as error:
        size = format_size(layout.num_blocks * layout.slot_bytes)
        raise InsufficientMemoryError(f"{size} of KV cache do not fit on {device}: {error}") from error
