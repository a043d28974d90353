"""The ranks of one process: each one's pool, device, KV cache and worker, made and closed together."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from kvstow.config import PoolConfig
from kvstow.dataplane import DataPlane
from kvstow.devices.cpu import CpuDevice
from kvstow.layout import KVLayout
from kvstow.memory.hostpool import HostPool
from kvstow.memory.mlock import MlockRegistrar
from kvstow_service.replay.kv import RankKV
from kvstow_service.replay.pattern import HostKV
from kvstow_service.replay.shapes import Shape, even_shape


@dataclass(frozen=True, slots=True)
class LocalRank:
    """One rank whose data plane lives in this process. Owns all it names."""

    worker: DataPlane
    pool: HostPool
    layout: KVLayout
    kv: RankKV

    def start_pinning(self) -> None:
        """Returns at once; the pool becomes usable slot by slot."""
        self.worker.start()

    def close(self) -> None:
        """End the copy thread, then unregister and unmap the pool. Idempotent."""
        self.worker.close()


def build_ranks(num_ranks: int, config: PoolConfig, kv_blocks: int, shape: Shape | None = None) -> list[LocalRank]:
    """`num_ranks` ranks, all or none. Pins nothing yet. Raises what `build_rank` raises."""
    with ExitStack() as undo:
        ranks = []
        for rank in range(num_ranks):
            ranks.append(build_rank(rank, config, kv_blocks, shape))
            undo.callback(ranks[-1].close)
        undo.pop_all()
    return ranks


def build_rank(rank: int, config: PoolConfig, kv_blocks: int, shape: Shape | None = None) -> LocalRank:
    """One rank with a KV cache of `kv_blocks` blocks; without a `shape`, of a few equal layers. Pins nothing yet.

    Raises `InsufficientMemoryError` for a pool or a KV cache that cannot fit.
    """
    layout = (shape or even_shape(config.slot_bytes)).layout(kv_blocks)
    kv = HostKV.allocate(rank, layout)
    with ExitStack() as undo:
        pool = HostPool(config, MlockRegistrar())
        undo.callback(pool.close)
        device = CpuDevice(pool, layout, kv.regions)
        undo.callback(device.close)
        local = LocalRank(DataPlane(rank, pool, device), pool, layout, kv)
        undo.pop_all()
    return local
