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
    """The columns of up to `bucket` blocks, for one device."""

    bucket: int
    free_after_upload: bool
    """Whether the memory may be written again once the uploaded arrays are ready; else once no program uses them."""

    addresses: Sequence[int]
    row_bytes: Sequence[int]
    """Where each column begins, and the length of its rows, which lie back to back."""

    def upload(self) -> list[jax.Array]:
        """Arrays of the device with the current contents. Does not wait for them."""


class PlainBuffer:
    """Ordinary memory. The CPU backend uses it in place; other devices copy from it, slowly."""

    free_after_upload = False

    def __init__(self, device: jax.Device, bucket: int, widths: Sequence[int], dtype: np.dtype) -> None:
        self.bucket, self.row_bytes = bucket, _row_bytes(widths, dtype)
        self._sharding = SingleDeviceSharding(device)
        self._columns = [_aligned(bucket, width, dtype) for width in widths]
        self.addresses: Sequence[int] = [column.ctypes.data for column in self._columns]

    def upload(self) -> list[jax.Array]:
        return list(jax.device_put(self._columns, self._sharding))


class PinnedBuffer:
    """Arrays in JAX's own pinned memory, which are written in place."""

    free_after_upload = True

    def __init__(self, device: jax.Device, bucket: int, widths: Sequence[int], dtype: np.dtype) -> None:
        self.bucket, self.row_bytes = bucket, _row_bytes(widths, dtype)
        self._sharding = SingleDeviceSharding(device)
        empty = [_aligned(bucket, width, dtype) for width in widths]
        pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
        self._columns = jax.block_until_ready(jax.device_put(jax.device_put(empty, self._sharding), pinned))
        self.addresses: Sequence[int] = [column.unsafe_buffer_pointer() for column in self._columns]

    def upload(self) -> list[jax.Array]:
        return list(jax.device_put(self._columns, self._sharding))


def load_buffers(
    devices: Sequence[jax.Device], sizes: Sequence[int], widths: Sequence[int], dtype: np.dtype, *, pinned: bool
) -> tuple[list[list[LoadBuffer]], str | None]:
    """For each size one buffer per device; and a message for operators if loads are slower than they could be."""
    notice = None
    if pinned and (reason := _why_not_pinned(devices[0], sizes, widths, dtype)) is not None:
        pinned, notice = False, f"loads do not use pinned memory, which makes them slow: {reason}"
    kind: type[PinnedBuffer] | type[PlainBuffer] = PinnedBuffer if pinned else PlainBuffer
    return [[kind(device, size, widths, dtype) for device in devices] for size in sizes], notice


def _why_not_pinned(device: jax.Device, sizes: Sequence[int], widths: Sequence[int], dtype: np.dtype) -> str | None:
    """Write to pinned buffers and look whether the bytes arrive: a platform may lay out its pinned arrays in another
    way than row after row, or not tell where they are."""
    try:
        for size in sorted(set(sizes)):
            buffer = PinnedBuffer(device, size, widths, dtype)
            for seed in (1, 2):  # the second round would find a stale copy of the first
                if not _arrives(buffer, seed):
                    return f"{device} does not see what is written to its pinned arrays"
    except Exception as error:  # noqa: BLE001 - whatever the platform has against it
        return f"{type(error).__name__}: {error}"
    return None


def _arrives(buffer: PinnedBuffer, seed: int) -> bool:
    generator = np.random.default_rng(seed)
    sent = [generator.integers(0, 256, (buffer.bucket, size), np.uint8) for size in buffer.row_bytes]
    for address, column in zip(buffer.addresses, sent, strict=True):
        ctypes.memmove(address, column.ctypes.data, column.nbytes)
    arrived = [np.asarray(array).view(np.uint8) for array in buffer.upload()]
    return all(map(np.array_equal, arrived, sent))


def _row_bytes(widths: Sequence[int], dtype: np.dtype) -> Sequence[int]:
    return [width * dtype.itemsize for width in widths]


def _aligned(rows: int, width: int, dtype: np.dtype) -> np.ndarray:
    num_bytes = rows * width * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(rows, width)
