"""The data plane of one rank, built around the KV cache of a vLLM worker, with a pool of its own or with the node
service's memory.

Where a block's bytes lie is derived from the strides of vLLM's KV cache tensors alone. Layouts differ between versions,
backends and models: K and V in one tensor or two, heads inside a block or outside, all layers in one storage or each in
its own, groups of layers in the same memory. The strides show which layout it is. vLLM's configuration fields change
their names too often to rely on them.

Importing this module imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvstow.config import PoolConfig
from kvstow.dataplane import DataPlane
from kvstow.devices.base import Fence
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import ConfigError
from kvstow.layout import KVLayout, Part, Region, Span
from kvstow.memory.hostpool import HostPool
from kvstow.memory.pinning import Registrar, cpu_registrar
from kvstow.memory.slotpool import SlotPool
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.connectors.engine_core.workerside import rank_pool_config

if TYPE_CHECKING:
    from kvstow.devices.cuda import CudaDevice


class KVGeometry(NamedTuple):
    """Where a block's bytes lie in the KV cache. `tensors[i]` is region `i` of `layout`: uint8, `[num_blocks,
    page_bytes]`, a view of vLLM's own memory. `contents[i]` is a digest of which layers lie where in its pages, and
    how. `parts` are the bytes that one layer after the other reads. `part_of[layer]` is the last part that the layer
    reads. Layers that share memory share a part."""

    layout: KVLayout
    tensors: tuple[torch.Tensor, ...]
    contents: tuple[str, ...]
    parts: tuple[Part, ...]
    part_of: Mapping[str, int]


class _Run(NamedTuple):
    """Contiguous bytes of block 0 in a storage, and the distance to the same bytes of the next block."""

    start: int
    num_bytes: int
    stride: int

    @property
    def end(self) -> int:
        return self.start + self.num_bytes

    def holds(self, other: _Run) -> bool:
        return self.stride == other.stride and self.start <= other.start and other.end <= self.end


def kv_geometry(kv_caches: Mapping[str, Any], num_blocks: int) -> KVGeometry:
    """The regions of a rank's KV cache of `num_blocks` blocks. `kv_caches[layer]` is a tensor, or several.

    Layers that share memory count once, and adjacent bytes of a block become one region. Raises `ConfigError` for a
    tensor that is not divided into that many blocks.
    """
    storages: dict[int, torch.Tensor] = {}
    runs: dict[int, dict[_Run, list[str]]] = {}
    of_layers: dict[str, list[tuple[int, _Run]]] = {}
    for layer, value in kv_caches.items():
        for tensor in [value] if isinstance(value, torch.Tensor) else value:
            if not tensor.numel():
                continue
            storage = tensor.untyped_storage().data_ptr()
            storages.setdefault(storage, tensor)
            for number, run in enumerate(_runs_of(layer, tensor, num_blocks)):
                arrangement = _arrangement(layer, tensor, num_blocks)
                runs.setdefault(storage, {}).setdefault(run, []).append(f"{layer} {number} {arrangement}")
                of_layers.setdefault(layer, []).append((storage, run))
    if not storages:
        raise ConfigError("kv_caches", sorted(kv_caches), "one KV cache tensor or more")
    regions: list[Region] = []
    views: list[torch.Tensor] = []
    contents: list[str] = []
    places: list[tuple[int, _Run]] = []
    for storage, tensor in storages.items():
        for run in _merged(runs[storage]):
            regions.append(Region(f"{len(regions)}", num_blocks, run.num_bytes, run.stride))
            views.append(_view(tensor, run, num_blocks))
            contents.append(_digest(run, runs[storage]))
            places.append((storage, run))
    parts, part_of = _parts(of_layers, places)
    return KVGeometry(KVLayout(tuple(regions)), tuple(views), tuple(contents), parts, part_of)


class _Taken(NamedTuple):
    """The bytes of a region that belong to a part."""

    start: int
    end: int
    part: int


def _parts(
    of_layers: Mapping[str, Sequence[tuple[int, _Run]]], places: Sequence[tuple[int, _Run]]
) -> tuple[tuple[Part, ...], dict[str, int]]:
    """The parts, and the last part of each layer. Each byte of a page belongs to the part of the first layer that reads
    it. `places[i]` is the storage and the run of region `i`."""
    parts: list[Part] = []
    part_of: dict[str, int] = {}
    taken: list[list[_Taken]] = [[] for _ in places]  # by region, ascending
    for layer, runs in of_layers.items():
        new: list[Span] = []
        last = -1
        for storage, run in runs:
            number = next(at for at, (where, region) in enumerate(places) if where == storage and region.holds(run))
            start = run.start - places[number][1].start
            free, owners = _free(taken[number], start, start + run.num_bytes)
            last = max(last, *owners, -1)
            new += [Span(number, first, end - first) for first, end in free]
            taken[number] = sorted([*taken[number], *(_Taken(first, end, len(parts)) for first, end in free)])
        if new:
            last = len(parts)
            parts.append(tuple(sorted(new)))
        part_of[layer] = last
    return tuple(parts), part_of


def _free(taken: Sequence[_Taken], start: int, end: int) -> tuple[list[tuple[int, int]], list[int]]:
    """The ranges between `start` and `end` that no part has taken, and the parts that have taken the others."""
    free, owners = [], []
    for first, last, part in taken:
        if last <= start or end <= first:
            continue
        if start < first:
            free.append((start, first))
        owners.append(part)
        start = max(start, last)
    if start < end:
        free.append((start, end))
    return free, owners


def _runs_of(layer: str, tensor: torch.Tensor, num_blocks: int) -> Iterable[_Run]:
    """The bytes of block 0, as runs. A block may consist of several kernel blocks, one after the other."""
    itemsize = tensor.element_size()
    dims = [(int(size), int(stride) * itemsize) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    axis = _block_axis(layer, tensor.shape, num_blocks)
    pieces, piece_stride = dims[axis][0] // num_blocks, dims[axis][1]
    inner = [dim for index, dim in enumerate(dims) if index != axis and dim[0] > 1]
    if pieces > 1:
        inner.append((pieces, piece_stride))
    num_bytes, starts = itemsize, [int(tensor.storage_offset()) * itemsize]
    for size, stride in sorted(inner, key=lambda dim: dim[1]):
        if stride == num_bytes:
            num_bytes *= size
        else:
            starts = [start + step * stride for start in starts for step in range(size)]
    return [_Run(start, num_bytes, pieces * piece_stride) for start in starts]


def _block_axis(layer: str, shape: Sequence[int], num_blocks: int) -> int:
    """The dimension that counts blocks. It is the first one, or the second one if the first is K and V."""
    if shape[0] % num_blocks == 0 and not (shape[0] == 2 and len(shape) > 1 and shape[1] == num_blocks):
        return 0
    if len(shape) > 1 and shape[0] == 2 and shape[1] % num_blocks == 0:
        return 1
    raise ConfigError(f"KV cache of layer {layer}", tuple(shape), f"a first dimension of {num_blocks} blocks")


def _merged(runs: Iterable[_Run]) -> list[_Run]:
    """Runs with the same stride that touch or overlap, joined while they stay within a block."""
    merged: list[_Run] = []
    for run in sorted(runs, key=lambda run: (run.stride, run.start)):
        last = merged[-1] if merged else None
        if last is not None and last.stride == run.stride and run.start <= last.end:
            end = max(last.end, run.end)
            if end - last.start <= run.stride:
                merged[-1] = _Run(last.start, end - last.start, run.stride)
                continue
        merged.append(run)
    return merged


def _arrangement(layer: str, tensor: torch.Tensor, num_blocks: int) -> str:
    """How the elements of one block lie: type, sizes and strides, independent of the number of blocks."""
    axis = _block_axis(layer, tensor.shape, num_blocks)
    pieces = tensor.shape[axis] // num_blocks
    block_stride = pieces * tensor.stride(axis)
    dims = [
        (pieces if index == axis else size, stride if stride < block_stride else None)
        for index, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]
    return f"{tensor.dtype} {axis} {dims}"


def _digest(region: _Run, runs: Mapping[_Run, Sequence[str]]) -> str:
    parts = [
        f"{run.start - region.start} {run.num_bytes} {content}"
        for run, contents in runs.items()
        if region.holds(run)
        for content in contents
    ]
    return sha256("\n".join(sorted(parts)).encode()).hexdigest()[:16]


def _view(tensor: torch.Tensor, run: _Run, num_blocks: int) -> torch.Tensor:
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), run.start, (num_blocks, run.num_bytes), (run.stride, 1))


MakePool = Callable[[Registrar, int | None], SlotPool]
"""Makes a pool, given the registrar and the NUMA node of the device."""


def build_plane(
    rank: int,
    pool_bytes: int,
    max_bytes: int,
    options: ConnectorOptions,
    kv: KVGeometry,
) -> DataPlane:
    """Build a rank's data plane around `kv`. It does not pin anything yet. If it raises a `KvstowError`, it leaves
    nothing behind."""
    config = rank_pool_config(options, kv.layout.slot_bytes, pool_bytes, max_bytes)

    def make_pool(registrar: Registrar, numa_node: int | None) -> HostPool:
        return HostPool(config, registrar, numa_node=numa_node)

    return plane_around(rank, kv, config, options, make_pool)


def plane_around(
    rank: int,
    kv: KVGeometry,
    config: PoolConfig,
    options: ConnectorOptions,
    make_pool: MakePool,
) -> DataPlane:
    """See `build_plane`; `make_pool` makes the pool."""
    by_layer = options.load_path != "async"
    device, parts = kv.tensors[0].device, kv.parts if by_layer else None
    mover: CudaDevice | CpuDevice
    with ExitStack() as undo:
        if device.type == "cuda":
            from kvstow.devices.cuda import CudaDevice, CudaOptions, CudaRegistrar

            registrar = CudaRegistrar(device.index)
            pool = make_pool(registrar, registrar.numa_node)
            undo.callback(pool.close)
            strategy = CudaOptions(strategy=options.copy_strategy)
            mover = CudaDevice(pool, kv.layout, kv.tensors, registrar=registrar, options=strategy, parts=parts)
        elif device.type == "cpu":
            pool = make_pool(cpu_registrar(config), None)
            undo.callback(pool.close)
            mover = CpuDevice(pool, kv.layout, kv.tensors, parts)
        else:
            raise ConfigError("device of the KV cache", str(device), "cuda or cpu")
        undo.callback(mover.close)
        plane = DataPlane(rank, pool, mover, layers=mover if by_layer else None)
        undo.pop_all()
    return plane


def fence_of(kv_caches: Mapping[str, Any]) -> Callable[[], Fence | None]:
    """Returns a function that makes a fence for the work given to the KV cache's compute stream so far. On the CPU, it
    returns None, because that work is done when its call returns."""
    first = next(iter(kv_caches.values()))
    device = (first if isinstance(first, torch.Tensor) else first[0]).device
    if device.type != "cuda":
        return lambda: None
    from kvstow.devices.cuda import CudaFence

    return lambda: CudaFence.record(torch.cuda.current_stream(device))
