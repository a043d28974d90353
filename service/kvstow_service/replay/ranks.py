"""The ranks of one process: each one's pool, device, KV cache and worker, made and closed together."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

from kvstow.config import PoolConfig
from kvstow.dataplane import DataPlane
from kvstow.devices.base import Launcher
from kvstow.layout import KVLayout
from kvstow.memory.hostpool import HostPool
from kvstow_service.replay.cachemaker import make_cache
from kvstow_service.replay.kv import RankKV
from kvstow_service.replay.place import ON_CPU, Place
from kvstow_service.replay.shapes import even_shape


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


def build_ranks(num_ranks: int, config: PoolConfig, kv_blocks: int, place: Place = ON_CPU) -> list[LocalRank]:
    """`num_ranks` ranks, all or none. Pins nothing yet. Raises what `build_rank` raises."""
    with ExitStack() as undo:
        ranks = []
        for rank in range(num_ranks):
            ranks.append(build_rank(rank, config, kv_blocks, place))
            undo.callback(ranks[-1].close)
        undo.pop_all()
    return ranks


def build_rank(rank: int, config: PoolConfig, kv_blocks: int, place: Place = ON_CPU) -> LocalRank:
    """One rank with a KV cache of `kv_blocks` blocks. Pins nothing yet.

    Raises `InsufficientMemoryError` for a pool or a KV cache that cannot fit, and `DriverUnavailableError` where
    there is no CUDA.
    """
    layout = (place.shape or even_shape(config.slot_bytes)).layout(kv_blocks)
    cache = make_cache(rank, layout, place)
    with ExitStack() as undo:
        pool = HostPool(config, cache.registrar, numa_node=cache.numa_node)
        undo.callback(pool.close)
        device = cache.make_device(pool)
        undo.callback(device.close)
        launcher = cast(Launcher, device) if cache.launches else None
        local = LocalRank(DataPlane(rank, pool, device, launcher=launcher), pool, layout, cache.kv)
        undo.pop_all()
    return local
