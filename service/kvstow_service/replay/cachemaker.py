"""Makes the KV cache of a rank on the device that a replay names."""

from __future__ import annotations

import numpy as np

from kvstow.bytesize import format_size
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import InsufficientMemoryError, MissingPackageError
from kvstow.layout import KVLayout
from kvstow.memory.mlock import MlockRegistrar
from kvstow_service.replay.pattern import HostKV, Page
from kvstow_service.replay.place import Place
from kvstow_service.replay.rankcache import RankCache


def make_cache(rank: int, layout: KVLayout, place: Place) -> RankCache:
    """The KV cache of a rank on the device of `place`. Imports torch for CUDA alone, and JAX for itself.

    Raises `InsufficientMemoryError` for a KV cache that does not fit, and `DriverUnavailableError` or
    `MissingPackageError` where there is no CUDA, no torch or no JAX.
    """
    if place.device == "cuda":
        try:
            from kvstow_service.replay.cudacache import make_cuda_cache
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise MissingPackageError("a replay on a GPU", "torch", "cuda") from error
        return make_cuda_cache(rank, layout, place.copy_strategy)
    if place.device == "jax":
        try:
            from kvstow_service.replay.jaxcache import make_jax_cache
        except ModuleNotFoundError as error:
            if error.name != "jax":
                raise
            raise MissingPackageError("a replay on JAX", "jax", "jax") from error
        return make_jax_cache(rank, layout)
    regions = _allocate(layout)
    kv = HostKV(rank, regions)
    return RankCache(layout, kv, MlockRegistrar(), lambda pool: CpuDevice(pool, layout, regions))


def _allocate(layout: KVLayout) -> list[Page]:
    """Zeros, which are not resident before they are written."""
    try:
        return [np.zeros((layout.num_blocks, region.page_bytes), np.uint8) for region in layout.regions]
    except MemoryError as error:
        size = format_size(layout.num_blocks * layout.slot_bytes)
        raise InsufficientMemoryError(f"{size} of KV cache do not fit on the CPU: {error}") from error
