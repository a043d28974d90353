"""The data plane of one rank, built around the KV cache of a vLLM worker.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from kvstow.config import PoolConfig
from kvstow.dataplane import DataPlane
from kvstow.devices.base import Fence
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import ConfigError
from kvstow.layout import Part
from kvstow.memory.hostpool import HostPool
from kvstow.memory.pinning import Registrar, cpu_registrar
from kvstow.memory.slotpool import SlotPool
from kvstow.messageorder import ReportSequence
from kvstow_service.connectors.engine_core.hostmemory import rank_pool_config
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.connectors.vllm.kvgeometry import KVGeometry

if TYPE_CHECKING:
    from kvstow.devices.cuda import CudaDevice

MakePool = Callable[[Registrar, int | None], SlotPool]
"""Makes a pool, given the registrar and the NUMA node of the device."""


def build_plane(
    rank: int,
    pool_bytes: int,
    max_bytes: int,
    options: ConnectorOptions,
    kv: KVGeometry,
    sender: ReportSequence | None = None,
) -> DataPlane:
    """A rank's data plane around `kv`. It does not pin anything yet. Leaves nothing behind if it raises a
    `KvstowError`."""
    config = rank_pool_config(options, kv.layout.slot_bytes, pool_bytes, max_bytes)

    def make_pool(registrar: Registrar, numa_node: int | None) -> HostPool:
        return HostPool(config, registrar, numa_node=numa_node)

    return plane_around(rank, kv, config, options, make_pool, sender)


def plane_around(
    rank: int,
    kv: KVGeometry,
    config: PoolConfig,
    options: ConnectorOptions,
    make_pool: MakePool,
    sender: ReportSequence | None = None,
) -> DataPlane:
    """A rank's data plane around `kv` and the pool that `make_pool` makes. Behaves like `build_plane` if it raises."""
    by_layer = options.load_path != "async"
    device = kv.tensors[0].device
    parts = kv.parts if by_layer else None
    with ExitStack() as undo:
        if device.type == "cuda":
            mover: CudaDevice | CpuDevice
            pool, mover = _on_cuda(options, kv, make_pool, parts, undo)
        elif device.type == "cpu":
            pool, mover = _on_cpu(config, kv, make_pool, parts, undo)
        else:
            raise ConfigError("device of the KV cache", str(device), "cuda or cpu")
        undo.callback(mover.close)
        plane = DataPlane(rank, pool, mover, reports=sender, layers=mover if by_layer else None)
        undo.pop_all()
    return plane


def _on_cpu(
    config: PoolConfig, kv: KVGeometry, make_pool: MakePool, parts: tuple[Part, ...] | None, undo: ExitStack
) -> tuple[SlotPool, CpuDevice]:
    pool = make_pool(cpu_registrar(config), None)
    undo.callback(pool.close)
    return pool, CpuDevice(pool, kv.layout, kv.tensors, parts)


def _on_cuda(
    options: ConnectorOptions, kv: KVGeometry, make_pool: MakePool, parts: tuple[Part, ...] | None, undo: ExitStack
) -> tuple[SlotPool, CudaDevice]:
    from kvstow.devices.cuda import CudaDevice, CudaOptions, CudaRegistrar

    registrar = CudaRegistrar(kv.tensors[0].device.index)
    pool = make_pool(registrar, registrar.numa_node)
    undo.callback(pool.close)
    strategy = CudaOptions(strategy=options.copy_strategy)
    return pool, CudaDevice(pool, kv.layout, kv.tensors, registrar=registrar, options=strategy, parts=parts)


def fence_of(kv_caches: Mapping[str, Any]) -> Callable[[], Fence | None]:
    """Makes fences for the work given to the KV cache's compute stream so far. On the CPU, that work is done when its
    call returns."""
    first = next(iter(kv_caches.values()))
    device = (first if isinstance(first, torch.Tensor) else first[0]).device
    if device.type != "cuda":
        return lambda: None
    from kvstow.devices.cuda import CudaFence

    return lambda: CudaFence.record(torch.cuda.current_stream(device))
