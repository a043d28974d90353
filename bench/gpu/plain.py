"""Copies by plain calls of the driver. They show what a host could do without KVStow, and the limit of the link.

Everything is given to the device at once, with a stream for each direction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch

from bench.gpu.rank import KVCache
from kvstow.devices.cuda.context import primary_context
from kvstow.devices.cuda.plan import Copies
from kvstow.memory.hostpool import HostPool
from kvstow.messages import Direction

Give = Callable[[Direction, Copies], None]

_new_stream: Any = torch.cuda.Stream  # untyped in torch


class PlainCopies:
    """Copies between `cache` and `pool`. The object takes `cache.num_bytes` more of the GPU's memory, for large
    copies."""

    def __init__(self, cache: KVCache, pool: HostPool) -> None:
        self._context, self._cu = primary_context(0), import_module("cuda.bindings.driver")
        self._streams: dict[Direction, Any] = {"store": _new_stream(), "load": _new_stream()}
        self.pages = _pages(cache, pool)
        self._flat = torch.empty(cache.num_bytes, dtype=torch.uint8, device="cuda")
        whole = np.array([cache.num_bytes], np.int64)
        self.large = Copies(np.array([self._flat.data_ptr()]), np.array([pool.address]), whole)

    def give(self, direction: Direction, copies: Copies) -> None:
        """Start the copies with one call: `cuMemcpyBatchAsync`, or `cuMemcpyAsync` for a single copy."""
        target, source = _ends(direction, copies)
        order, stream = ("stream" if direction == "store" else "any"), self._streams[direction].cuda_stream
        with self._context.current():
            self._context.driver.copy(target, source, copies.size, order, stream)  # type: ignore[arg-type]

    def give_each(self, direction: Direction, copies: Copies) -> None:
        """Start the copies with one `cuMemcpyAsync` for each."""
        copy, stream = self._cu.cuMemcpyAsync, self._streams[direction].cuda_stream
        target, source = _ends(direction, copies)
        with self._context.current():
            for arguments in zip(target.tolist(), source.tolist(), copies.size.tolist(), strict=True):
                (status,) = copy(*arguments, stream)
                if status:
                    raise RuntimeError(f"cuMemcpyAsync failed: {status}")

    def wait(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def rate(self, give: Give, copies: Copies, directions: Sequence[Direction]) -> float:
        """Return bytes per second. With two directions, each makes a part of the copies."""
        parts = _shares(copies, len(directions))
        torch.cuda.synchronize()
        started = time.perf_counter()
        for direction, part in zip(directions, parts, strict=True):
            give(direction, part)
        self.wait()
        return sum(int(part.size.sum()) for part in parts) / (time.perf_counter() - started)


def first(copies: Copies, most: int) -> Copies:
    return Copies(*(values[:most] for values in copies))


def _pages(cache: KVCache, pool: HostPool) -> Copies:
    """Return a copy for each page. The pages of a block follow each other."""
    page = cache.shape.page_bytes
    bases = np.array([tensor.data_ptr() for tensor in cache.tensors])
    offsets = np.arange(len(bases)) * page
    device = (bases + cache.blocks[:, None] * page).ravel()
    host = (pool.address + cache.slots[:, None] * pool.slot_stride + offsets).ravel()
    return Copies(device, host, np.full(len(device), page, np.int64))


def _shares(copies: Copies, number: int) -> list[Copies]:
    if len(copies.size) > 1 or number == 1:
        each = len(copies.size) // number
        return [Copies(*(values[i * each : (i + 1) * each] for values in copies)) for i in range(number)]
    size = copies.size // number  # each half of the one large copy
    return [Copies(copies.device + i * size, copies.host + i * size, size) for i in range(number)]


def _ends(direction: Direction, copies: Copies) -> tuple[Any, Any]:
    """Return the target and the source."""
    return (copies.host, copies.device) if direction == "store" else (copies.device, copies.host)
