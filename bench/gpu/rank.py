"""A rank to measure: a KV cache full of random bytes, a pinned pool, and a worker that copies between them.

Blocks and slots are in random orders, so that neighbours are rare.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch

from kvstow.config import PoolConfig
from kvstow.dataplane import DataPlane
from kvstow.devices.base import Device
from kvstow.devices.cuda import CudaDevice, CudaOptions, CudaRegistrar
from kvstow.layout import KVLayout, Region
from kvstow.memory.hostpool import HostPool
from kvstow.messages import Direction, Op, StepPlan

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BOTH: tuple[Direction, ...] = ("store", "load")

_PATIENCE = 60.0  # seconds
_ONE_REGISTRATION = 64 * GIB  # so large that no copy crosses the border of two registrations


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a KV cache: `layers` regions with pages of `page_bytes` bytes."""

    page_bytes: int
    layers: int

    @property
    def slot_bytes(self) -> int:
        return self.page_bytes * self.layers

    def __str__(self) -> str:
        return f"{self.page_bytes // KIB} KiB x {self.layers}"


class KVCache:
    """A KV cache with about `num_bytes` of blocks to move, on a GPU that has room for a quarter more."""

    def __init__(self, shape: Shape, num_bytes: int) -> None:
        self.shape, self.num_slots = shape, num_bytes // shape.slot_bytes
        self.num_bytes = self.num_slots * shape.slot_bytes
        num_blocks, page = self.num_slots + self.num_slots // 4, shape.page_bytes
        self.tensors = [
            torch.randint(0, 256, (num_blocks, page), dtype=torch.uint8, device="cuda") for _ in range(shape.layers)
        ]
        self.layout = KVLayout(tuple(Region(str(layer), num_blocks, page, page) for layer in range(shape.layers)))
        chance = np.random.default_rng(0)
        self.blocks = chance.permutation(num_blocks)[: self.num_slots]
        self.slots = chance.permutation(self.num_slots)

    @contextmanager
    def pool(self) -> Iterator[tuple[HostPool, CudaRegistrar]]:
        """Yield a pool that is pinned, in one piece."""
        registrar = CudaRegistrar()
        config = PoolConfig(self.shape.slot_bytes, self.num_bytes, chunk_bytes=_ONE_REGISTRATION, pause=0.0)
        pool = HostPool(config, registrar)
        try:
            changed = threading.Event()
            pool.add_listener(changed.set)
            pool.start()
            while pool.pinned_slots < self.num_slots:
                if not changed.wait(_PATIENCE):
                    raise RuntimeError(f"the pool does not pin: {pool.status()}")
                changed.clear()
            yield pool, registrar
        finally:
            pool.close()

    @contextmanager
    def worker(self, make_device: Callable[..., Device] = CudaDevice, **options: Any) -> Iterator[Traffic]:
        """Yield the traffic of a worker as a host has it, with a pinned pool. `options` are those of `CudaOptions`."""
        with self.pool() as (pool, registrar):
            device = make_device(pool, self.layout, self.tensors, registrar=registrar, options=CudaOptions(**options))
            worker = DataPlane(0, pool, device)
            try:
                yield Traffic(worker, self)
            finally:
                worker.close()


class Traffic:
    """Ops of one worker. If both directions move at once, each moves half of the cache."""

    def __init__(self, worker: DataPlane, cache: KVCache) -> None:
        self._worker = worker
        self._ids, self._running = count(1), 0
        half = cache.num_slots // 2
        self._pairs = (cache.blocks.tolist(), cache.slots.tolist())
        self._parts = {"store": slice(0, half), "load": slice(half, 2 * half)}
        self.half_bytes = half * cache.shape.slot_bytes
        self.num_bytes = cache.num_bytes

    def submit(self, *directions: Direction, half: bool = False) -> None:
        """Submit one op for each of `directions`. With `half`, it moves half of the cache: one half for stores, and the
        other for loads."""
        parts = [self._parts[direction] if half else slice(None) for direction in directions]
        blocks, slots = ([tuple(values[part]) for part in parts] for values in self._pairs)
        self._running += len(directions)
        self._worker.submit(StepPlan(tuple(map(Op, self._ids, directions, blocks, slots))))

    def drive(self) -> None:
        self._worker.drive()

    def is_running(self) -> bool:
        for completion in self._worker.take_completions():
            if completion.mark == "failed":
                raise RuntimeError(completion.error)
            self._running -= completion.mark == "done"
        return self._running > 0

    def finish(self) -> None:
        while self.is_running():
            self._worker.wait_completions(_PATIENCE)

    def seconds(self, directions: Sequence[Direction]) -> float:
        """Return the seconds from the submission until the host knows that all copies have ended."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.submit(*directions, half=len(directions) > 1)
        self.finish()
        return time.perf_counter() - started
