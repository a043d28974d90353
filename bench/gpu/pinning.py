"""What pinning costs the steps of an engine that serves meanwhile, and how soon a pool can be used.

    OUT=/tmp/out python -m bench.gpu.pinning [--gib 16] [--tune]

Writes `pinning.json` and `pinning.png`. Ways that register memory which is populated before are repeated, for enough
steps; the others run once, as a whole pool does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.decode import DecodeLoop, Latencies, summarize
from kvstow.config import PoolConfig
from kvstow.devices.cuda import CudaRegistrar
from kvstow.memory import pace as pace_module
from kvstow.memory.pace import AdaptivePace, FixedPace, Pace
from kvstow.memory.pool import HostPool
from kvstow.memory.region import HostRegion

GIB, MIB = 1 << 30, 1 << 20
SLOT_BYTES = 2 * MIB
_ROUNDS = 3
_MADV_NOHUGEPAGE = 15


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to pin. `gib_per_second`: over all of the time that it took, pauses included."""

    name: str
    gib_per_second: float
    latencies: Latencies
    chunk_mib: float = 0.0

    def __str__(self) -> str:
        steps = self.latencies
        return (
            f"{self.name:44s} {self.gib_per_second:6.1f} GiB/s; step p50 {steps.p50:.3f} p99 {steps.p99:.3f} "
            f"p99.9 {steps.p999:.3f} longest {steps.longest:.2f} ms ({steps.steps} steps); last call {self.chunk_mib:.1f} MiB"
        )


@dataclass(frozen=True, slots=True)
class FirstSlot:
    """From before the pool is made: until its thread was started, and until a slot could be used."""

    pool_gib: int
    made_ms: float
    first_slot_ms: float


class Registering:
    """Registers populated memory piece by piece, and gives it back."""

    def __init__(self, region: HostRegion) -> None:
        self._region, self._registrar = region, CudaRegistrar()

    def whole(self) -> float:
        return self.paced(FixedPace(self._region.num_bytes, 0.0))

    def paced(self, pace: Pace) -> float:
        """Seconds; all is unregistered afterwards, outside of them."""
        ranges, offset, began = [], 0, time.perf_counter()
        while offset < self._region.num_bytes:
            size = min(pace.chunk_bytes // SLOT_BYTES * SLOT_BYTES or SLOT_BYTES, self._region.num_bytes - offset)
            started = time.perf_counter()
            self._registrar.register(self._region.address + offset, size)
            pace.record(size, time.perf_counter() - started)
            ranges.append((self._region.address + offset, size))
            offset += size
            if pace.pause:
                time.sleep(pace.pause)
        seconds = time.perf_counter() - began
        self._ranges = ranges
        return seconds

    def undo(self) -> None:
        for address, size in self._ranges:
            self._registrar.unregister(address, size)


@contextmanager
def populated(num_bytes: int) -> Iterator[HostRegion]:
    region = HostRegion(num_bytes)
    try:
        region.commit(0, num_bytes)
        yield region
    finally:
        region.close()


def idle(seconds: float, name: str) -> Measured:
    with DecodeLoop() as loop:
        time.sleep(seconds)
        return Measured(name, 0.0, summarize(loop.take()))


def register_populated(name: str, region: HostRegion, make_pace: Callable[[], Pace], rounds: int = _ROUNDS) -> Measured:
    registering, steps, seconds = Registering(region), list[float](), 0.0
    for _ in range(rounds):
        pace = make_pace()
        with DecodeLoop() as loop:
            seconds += registering.paced(pace)
            steps += loop.take()
        registering.undo()
    rate = rounds * region.num_bytes / GIB / seconds
    return Measured(name, rate, summarize(steps), pace.chunk_bytes / MIB)


def register_cold(name: str, num_bytes: int) -> Measured:
    """One call over memory that was never touched, without huge pages."""
    region = HostRegion(num_bytes)
    try:
        region._without_huge_pages()  # type: ignore[attr-defined]
        with DecodeLoop() as loop:
            seconds = Registering(region).whole()
            return Measured(name, num_bytes / GIB / seconds, summarize(loop.take()))
    finally:
        region.close()


def pin_pool(name: str, num_bytes: int, **pace: Any) -> Measured:
    """A whole pool of KVStow: populate and register."""
    pool = HostPool(PoolConfig(SLOT_BYTES, num_bytes, **pace), CudaRegistrar())
    try:
        done = threading.Event()
        pool.add_listener(lambda: done.set() if pool.status().state != "pinning" else None)
        with DecodeLoop() as loop:
            started = time.perf_counter()
            pool.start()
            done.wait()
            seconds, steps = time.perf_counter() - started, loop.take()
        status = pool.status()
        if status.error is not None:
            raise RuntimeError(status.error)
        return Measured(name, num_bytes / GIB / seconds, summarize(steps), num_bytes / MIB / status.chunks_done)
    finally:
        pool.close()


def first_slot(pool_gib: int) -> FirstSlot:
    started, usable = time.perf_counter(), threading.Event()
    pool = HostPool(PoolConfig(SLOT_BYTES, pool_gib * GIB), CudaRegistrar())
    try:
        pool.add_listener(usable.set)
        pool.start()
        made = time.perf_counter() - started
        usable.wait()
        return FirstSlot(pool_gib, made * 1e3, (time.perf_counter() - started) * 1e3)
    finally:
        pool.close()
