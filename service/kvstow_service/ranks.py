"""The ranks of one process: each one's pool, CPU device, KV cache and worker, made and closed together.

Importing this module imports torch.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from kvstow.config import PoolConfig
from kvstow.devices.cpu import CpuDevice, MlockRegistrar
from kvstow.layout import KVLayout, Region
from kvstow.memory.pool import HostPool
from kvstow.worker import OffloadWorker

_LAYERS = 4  # enough to exercise gathering from several regions


@dataclass(frozen=True, slots=True)
class LocalRank:
    """One rank whose data plane lives in this process.

    `tensors[i]` is region `i` of `layout`: uint8, `[num_blocks, page_bytes]`, written by whoever plays the
    model. Owns all it names.
    """

    worker: OffloadWorker
    layout: KVLayout
    tensors: tuple[torch.Tensor, ...]

    def start_pinning(self) -> None:
        """Returns at once; the pool becomes usable slot by slot."""
        self.worker.pool.start()

    def close(self) -> None:
        """End the copy thread, then unregister and unmap the pool. Idempotent."""
        self.worker.close()


def build_ranks(num_ranks: int, config: PoolConfig, kv_blocks: int) -> list[LocalRank]:
    """`num_ranks` ranks, all or none. Pins nothing yet. Raises what `build_rank` raises."""
    with ExitStack() as undo:
        ranks = []
        for rank in range(num_ranks):
            ranks.append(build_rank(rank, config, kv_blocks))
            undo.callback(ranks[-1].close)
        undo.pop_all()
    return ranks


def build_rank(rank: int, config: PoolConfig, kv_blocks: int) -> LocalRank:
    """One rank with a KV cache of `kv_blocks` blocks. Pins nothing yet.

    Raises `InsufficientMemoryError` for a pool that cannot fit.
    """
    layout = cpu_layout(config.slot_bytes, kv_blocks)
    with ExitStack() as undo:
        pool = HostPool(config, MlockRegistrar())
        undo.callback(pool.close)
        # Zeroed memory of this size is not resident before it is written.
        tensors = tuple(torch.zeros((kv_blocks, region.page_bytes), dtype=torch.uint8) for region in layout.regions)
        worker = OffloadWorker(rank, pool, CpuDevice(pool, layout, tensors))
        undo.pop_all()
    return LocalRank(worker, layout, tensors)


def cpu_layout(slot_bytes: int, kv_blocks: int) -> KVLayout:
    """`slot_bytes` over four equal regions, or one where four do not divide it."""
    layers = _LAYERS if slot_bytes % _LAYERS == 0 else 1
    page_bytes = slot_bytes // layers
    return KVLayout(tuple(Region(f"layer.{layer}", kv_blocks, page_bytes, page_bytes) for layer in range(layers)))
