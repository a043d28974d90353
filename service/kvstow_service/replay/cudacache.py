"""The KV cache of a replay on a GPU, in torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kvstow.bytesize import format_size
from kvstow.config import CopyStrategy
from kvstow.devices.base import Fence
from kvstow.devices.cuda import CudaDevice, CudaFence, CudaOptions, CudaRegistrar, DriverUnavailableError
from kvstow.devices.cuda.driver import load_driver
from kvstow.errors import InsufficientMemoryError
from kvstow.layout import KVLayout
from kvstow_service.replay.pattern import WORD_BYTES, WORD_STEP, PatternedKV
from kvstow_service.replay.rankcache import RankCache


class _PagePattern:
    """The `Pattern` of tensors. Its 64-bit words are signed and wrap around."""

    def __init__(self, page_bytes: int, device: torch.device) -> None:
        words = -(-page_bytes // WORD_BYTES)
        self._positions = torch.arange(words, dtype=torch.int64, device=device) * WORD_STEP
        self._words = torch.empty_like(self._positions)
        self._page = self._words.view(torch.uint8)[:page_bytes]

    def page(self, seed: int) -> torch.Tensor:
        torch.add(self._positions, seed - (seed >> 63 << 64), out=self._words)
        return self._page

    def is_page(self, page: torch.Tensor, seed: int) -> bool:
        return torch.equal(page, self.page(seed))


class TensorKV(PatternedKV):
    """The KV cache of one rank in tensors. Work runs on the current stream of their device."""

    def __init__(self, rank: int, regions: Sequence[torch.Tensor]) -> None:
        self._device = regions[0].device
        super().__init__(rank, regions, partial(_PagePattern, device=self._device))

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
