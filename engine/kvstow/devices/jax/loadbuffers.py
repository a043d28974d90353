"""Host memory through which loads reach the devices. JAX never sees the pool itself: on the CPU an array would be a
view of it, and CUDA refuses copies that span two registrations of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

_ALIGNMENT = 64  # of memory that the CPU backend uses in place


class LoadBuffer(Protocol):
    """The rows of up to `bucket` blocks, for one device (see `DevicePrograms`)."""

    bucket: int
    address: int
    """Of the first row; they lie back to back."""

    def upload(self) -> jax.Array:
        """An array of the device with the current contents, on the host's thread. Does not wait for it. The memory may
        be written again when the program that uses the array has ended."""


class PlainBuffer:
    """Ordinary memory. The CPU backend uses it in place; other devices copy from it, slowly."""

    def __init__(self, device: jax.Device, bucket: int, width: int, dtype: np.dtype) -> None:
        self.bucket, self._sharding = bucket, SingleDeviceSharding(device)
        self._rows = _aligned(bucket, width, dtype)
        self.address: int = self._rows.ctypes.data

    def upload(self) -> jax.Array:
        return jax.device_put(self._rows, self._sharding)


class PinnedBuffer:
    """Arrays in JAX's own pinned memory, which are written in place."""

    def __init__(self, device: jax.Device, bucket: int, width: int, dtype: np.dtype) -> None:
        self.bucket, self._sharding = bucket, SingleDeviceSharding(device)
        empty = _aligned(bucket, width, dtype)
        pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
        self._rows = jax.block_until_ready(jax.device_put(jax.device_put(empty, self._sharding), pinned))
        self.address: int = self._rows.unsafe_buffer_pointer()

    def upload(self) -> jax.Array:
        return jax.device_put(self._rows, self._sharding)


def load_buffers(
    devices: Sequence[jax.Device], sizes: Sequence[int], width: int, dtype: np.dtype, *, pinned: bool
) -> tuple[list[list[LoadBuffer]], str | None]:
    """For each size one buffer per device; and a message for operators if loads are slower than they could be."""
    notice = None
    if pinned and (reason := _why_not_pinned(devices[0], sizes, width, dtype)) is not None:
        pinned, notice = False, f"loads do not use pinned memory, which makes them slow: {reason}"
    kind: type[PinnedBuffer] | type[PlainBuffer] = PinnedBuffer if pinned else PlainBuffer
    return [[kind(device, size, width, dtype) for device in devices] for size in sizes], notice


def _why_not_pinned(device: jax.Device, sizes: Sequence[int], width: int, dtype: np.dtype) -> str | None:
    """Write to pinned buffers and look whether the bytes arrive: a platform may lay out its pinned arrays in another
    way than row after row, or not tell where they are."""
    try:
        for size in sorted(set(sizes)):
            buffer = PinnedBuffer(device, size, width, dtype)
            for seed in (1, 2):  # the second round would find a stale copy of the first
                if not _arrives(buffer, width * dtype.itemsize, seed):
                    return f"{device} does not see what is written to its pinned arrays"
    except Exception as error:  # noqa: BLE001 - whatever the platform has against it
        return f"{type(error).__name__}: {error}"
    return None


def _arrives(buffer: PinnedBuffer, row_bytes: int, seed: int) -> bool:
    sent = np.random.default_rng(seed).integers(0, 256, (buffer.bucket, row_bytes), np.uint8)
    ctypes.memmove(buffer.address, sent.ctypes.data, sent.nbytes)
    return np.array_equal(np.asarray(buffer.upload()).view(np.uint8), sent)


def _aligned(rows: int, width: int, dtype: np.dtype) -> np.ndarray:
    num_bytes = rows * width * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(rows, width)
