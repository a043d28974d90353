"""The ranks of one process: each one's pool, device, KV cache and worker, made and closed together.

Importing this module imports torch.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from kvstow.bytesize import format_size
from kvstow.config import PoolConfig
from kvstow.dataplane import DataPlane
from kvstow.devices.base import Device
from kvstow.devices.cpu import CpuDevice
from kvstow.devices.cuda import CudaDevice, CudaOptions, CudaRegistrar, DriverUnavailableError
from kvstow.devices.cuda.driver import load_driver
from kvstow.errors import InsufficientMemoryError
from kvstow.layout import KVLayout
from kvstow.memory.hostpool import HostPool
from kvstow.memory.mlock import cpu_registrar
from kvstow_service.replay.place import ON_CPU, Place
from kvstow_service.replay.shapes import even_shape

_Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class LocalRank:
    """One rank whose data plane lives in this process.

    `tensors[i]` is region `i` of `layout`: uint8, `[num_blocks, page_bytes]`, written by whoever plays the
    model. Owns all it names.
    """

    worker: DataPlane
    layout: KVLayout
    tensors: tuple[torch.Tensor, ...]

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
    with ExitStack() as undo:
        if place.device == "cuda":
            pool, device, tensors = _on_cuda(rank, config, layout, CudaOptions(strategy=place.copy_strategy), undo)
        else:
            pool, device, tensors = _on_cpu(config, layout, undo)
        undo.callback(device.close)
        local = LocalRank(DataPlane(rank, pool, device), layout, tensors)
        undo.pop_all()
    return local


def _on_cpu(config: PoolConfig, layout: KVLayout, undo: ExitStack) -> tuple[HostPool, Device, _Tensors]:
    pool = HostPool(config, cpu_registrar(config))
    undo.callback(pool.close)
    tensors = _kv_cache(layout, torch.device("cpu"))  # not resident before it is written
    return pool, CpuDevice(pool, layout, tensors), tensors


def _on_cuda(
    rank: int, config: PoolConfig, layout: KVLayout, options: CudaOptions, undo: ExitStack
) -> tuple[HostPool, Device, _Tensors]:
    ordinal = _gpu_of(rank)
    registrar = CudaRegistrar(ordinal)
    pool = HostPool(config, registrar, numa_node=registrar.numa_node)
    undo.callback(pool.close)
    tensors = _kv_cache(layout, torch.device("cuda", ordinal))
    return pool, CudaDevice(pool, layout, tensors, registrar=registrar, options=options), tensors


def _gpu_of(rank: int) -> int:
    """Ranks take the GPUs in turn."""
    load_driver()
    if not torch.cuda.is_available():
        raise DriverUnavailableError(f"torch {torch.__version__} sees no GPU, or was built without CUDA")
    return rank % torch.cuda.device_count()


def _kv_cache(layout: KVLayout, device: torch.device) -> tuple[torch.Tensor, ...]:
    try:
        return tuple(
            torch.zeros((layout.num_blocks, region.page_bytes), dtype=torch.uint8, device=device)
            for region in layout.regions
        )
    except torch.OutOfMemoryError as error:
        size = format_size(layout.num_blocks * layout.slot_bytes)
        raise InsufficientMemoryError(f"{size} of KV cache do not fit on {device}: {error}") from error
