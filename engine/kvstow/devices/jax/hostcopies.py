"""Host memory on the way between the pool and the devices: how much of it ops may hold, the buffers of loads, and
copies between its ranges.

JAX never gets the memory of the pool itself: on the CPU an array would be a view of it, and CUDA refuses copies that
span two registrations of it. Copies run on several threads, because one reaches a tenth of a fast link, or a fifth
where glibc writes past the cache (see docs/architecture.md)."""

from __future__ import annotations

import ctypes
import re
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from threading import Event
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

_PATIENCE = 30.0
"""Seconds that `wait_until` waits at most. A copy takes milliseconds."""

_POLL = 1e-4
"""Seconds between two checks of a condition."""

PAST_CACHE_BYTES = 1 << 20
"""Copies of this many bytes or more are worth writing past the cache, because nothing reads the bytes soon."""
_SHARE_BYTES = 1 << 20
"""Bytes that are worth a thread of their own: fewer are copied sooner than another thread wakes up."""
_LOADER = "/lib64/ld-linux-x86-64.so.2"
_ALIGNMENT = 64
"""The alignment, in bytes, of memory that the CPU backend uses in place."""


class Held:
    """Bytes that count as in flight until this object is dropped."""

    def __init__(self, num_bytes: int, returned: deque[int]) -> None:
        self._num_bytes, self._returned = num_bytes, returned

    def __del__(self) -> None:
        self._returned.append(self._num_bytes)  # without a lock: a finalizer may run in the middle of anything


class BytesInFlight:
    """Counts bytes up to `limit`; one piece larger than that may be in flight alone. Used by one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._returned: deque[int] = deque()

    def take(self, num_bytes: int) -> Held | None:
        """Count these bytes for as long as the result lives; None if that exceeds the limit."""
        while self._returned:
            self._taken -= self._returned.popleft()
        if self._taken and self._taken + num_bytes > self._limit:
            return None
        self._taken += num_bytes
        return Held(num_bytes, self._returned)


def wait_until(condition: Callable[[], bool], stopping: Event) -> bool:
    """Wait until the copy thread has made the condition true, but only until `stopping` is set, and for 30 seconds at
    most. Returns False if the condition has not become true."""
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() >= deadline or stopping.wait(_POLL):
            return False
    return True


class Range(NamedTuple):
    """A copy: its addresses, and its length in bytes."""

    target: int
    source: int
    num_bytes: int


class CopyJob:
    """Ranges that are being copied."""

    def __init__(self, shares: Sequence[Future[None]] = ()) -> None:
        self._shares = shares

    @property
    def has_ended(self) -> bool:
        """Whether no thread uses the memory any more."""
        return all(share.done() for share in self._shares)

    def result(self) -> None:
        """Wait until all copies have ended. Raises the error of a copy that has failed."""
        wait(self._shares)
        for share in self._shares:
            share.result()


class RangeCopier:
    """Owns its threads. A thread that has done its share of a job begins with the next job."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "kvstow-memcpy")

    def start(self, ranges: Sequence[Range]) -> CopyJob:
        """Begin to copy all ranges. A small job is copied within the call. The caller guarantees that the memory stays
        until the job has ended, and that targets are disjoint."""
        num_bytes = sum(one.num_bytes for one in ranges)
        if num_bytes <= _SHARE_BYTES:
            _copy(ranges)
            return CopyJob()
        shares = max(1, min(self._num_threads, num_bytes // _SHARE_BYTES, len(ranges)))
        bounds = [share * len(ranges) // shares for share in range(shares + 1)]
        return CopyJob([self._threads.submit(_copy, ranges[start:end]) for start, end in pairwise(bounds)])

    def close(self) -> None:
        """Wait for all jobs."""
        self._threads.shutdown()


def cached_copy_bytes() -> int | None:
    """The size up to which glibc copies through the CPU's cache in processes started with this environment; None where
    that is unknown: on other processors, with other C libraries, and with glibc before 2.33."""
    command = [_LOADER, "--list-tunables"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"x86_non_temporal_threshold: 0x([0-9a-f]+)", listed)
    return int(found[1], 16) if found else None


def _copy(ranges: Sequence[Range]) -> None:
    for target, source, num_bytes in ranges:
        ctypes.memmove(target, source, num_bytes)  # it releases the interpreter


class LoadBuffer:
    """The rows of up to `bucket` blocks, for one device (see `DevicePrograms`). They lie back to back, from `address`
    on: in ordinary memory, which the CPU backend uses in place and other devices copy from slowly, or in JAX's own
    pinned memory, which is written in place."""

    def __init__(self, device: jax.Device, bucket: int, width: int, dtype: np.dtype, *, pinned: bool) -> None:
        self.bucket, self._sharding = bucket, SingleDeviceSharding(device)
        rows = _aligned(bucket, width, dtype)
        self._rows: np.ndarray | jax.Array = rows
        self.address: int = rows.ctypes.data
        if pinned:
            host = SingleDeviceSharding(device, memory_kind="pinned_host")
            array = jax.block_until_ready(jax.device_put(self.upload(), host))
            self._rows, self.address = array, array.unsafe_buffer_pointer()

    def upload(self) -> jax.Array:
        """An array of the device with the current contents. The host's thread calls it, and it does not wait for the
        transfer. The memory may be written again when the program that uses the array has ended."""
        return jax.device_put(self._rows, self._sharding)


def load_buffers(
    devices: Sequence[jax.Device], sizes: Sequence[int], width: int, dtype: np.dtype, *, pinned: bool
) -> tuple[list[list[LoadBuffer]], str | None]:
    """One buffer per device for each size, and a message for operators if loads are slower than they could be."""
    notice = None
    if pinned and (reason := _why_not_pinned(devices[0], sizes, width, dtype)) is not None:
        pinned, notice = False, f"loads do not use pinned memory, which makes them slow: {reason}"
    return [[LoadBuffer(device, size, width, dtype, pinned=pinned) for device in devices] for size in sizes], notice


def _why_not_pinned(device: jax.Device, sizes: Sequence[int], width: int, dtype: np.dtype) -> str | None:
    """Write to pinned buffers and look whether the bytes arrive, because a platform may lay out its pinned arrays in
    another way than row after row, or not tell where they are. Returns a reason not to use them, or None."""
    try:
        for size in sorted(set(sizes)):
            buffer = LoadBuffer(device, size, width, dtype, pinned=True)
            for seed in (1, 2):  # the second round would find a stale copy of the first
                if not _arrives(buffer, width * dtype.itemsize, seed):
                    return f"{device} does not see what is written to its pinned arrays"
    except Exception as error:  # noqa: BLE001 - any error of the platform is a reason
        return f"{type(error).__name__}: {error}"
    return None


def _arrives(buffer: LoadBuffer, row_bytes: int, seed: int) -> bool:
    sent = np.random.default_rng(seed).integers(0, 256, (buffer.bucket, row_bytes), np.uint8)
    ctypes.memmove(buffer.address, sent.ctypes.data, sent.nbytes)
    return np.array_equal(np.asarray(buffer.upload()).view(np.uint8), sent)


def _aligned(rows: int, width: int, dtype: np.dtype) -> np.ndarray:
    num_bytes = rows * width * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(rows, width)
