"""Checks that torch tensors match the regions of a layout, for devices that address them by stride."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstow.errors import ConfigError
from kvstow.layout import KVLayout, Region
from kvstow.memory.slotpool import SlotPool


def check_tensors(pool: SlotPool, layout: KVLayout, tensors: Sequence[torch.Tensor], device_type: str) -> None:
    """Raises `ConfigError` unless `tensors[i]` is region `i` of `layout`, all on one device of `device_type`, and the
    pool's slots hold a block."""
    layout.require(pool.slot_bytes, len(tensors))
    for region, tensor in zip(layout.regions, tensors, strict=True):
        if tensor.device.type != device_type or tensor.device != tensors[0].device:
            raise ConfigError(f"region {region.name}", str(tensor.device), f"one {device_type} device for all regions")
        _check_tensor(region, tensor)


def _check_tensor(region: Region, tensor: torch.Tensor) -> None:
    key = f"region {region.name}"
    if tensor.dtype is not torch.uint8:
        raise ConfigError(key, tensor.dtype, "torch.uint8")
    if tuple(tensor.shape) != (region.num_blocks, region.page_bytes):
        raise ConfigError(key, tuple(tensor.shape), f"shape {(region.num_blocks, region.page_bytes)}")
    if region.page_bytes > 1 and tensor.stride(1) != 1:
        raise ConfigError(key, tensor.stride(), "rows without gaps between their bytes")
    if region.num_blocks > 1 and tensor.stride(0) != region.stride_bytes:
        raise ConfigError(key, tensor.stride(0), f"a row stride of {region.stride_bytes} bytes")
