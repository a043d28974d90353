"""What pinning costs the steps of an engine that serves meanwhile, and how soon a pool can be used.

    OUT=/tmp/out python -m bench.gpu.pinning [--gib 16]

Writes `pinning.json` and `pinning.png`. Ways that register memory which was populated before are repeated, so that
there are enough steps. The others run once, like a whole pool.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.decode import DecodeLoop, Latencies, summarize
from kvstow.config import PoolConfig
from kvstow.devices.cuda import CudaRegistrar
from kvstow.memory.hostpool import HostPool
from kvstow.memory.hoststeps import HostSteps
from kvstow.memory.pinning import AdaptivePace, FixedPace, Pace
from kvstow.memory.region import HostRegion

GIB, MIB = 1 << 30, 1 << 20
SLOT_BYTES = 2 * MIB
_ROUNDS = 3
_MADV_NOHUGEPAGE = 15


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to pin. `gib_per_second` is its rate over the whole time, pauses included."""

    name: str
    gib_per_second: float
    latencies: Latencies
    chunk_mib: float = 0.0

    def __str__(self) -> str:
        steps = self.latencies
        return (
            f"{self.name:44s} {self.gib_per_second:6.1f} GiB/s; step p50 {steps.p50:.3f} p99 {steps.p99:.3f} "
            f"p99.9 {steps.p999:.3f} longest {steps.longest:.2f} ms ({steps.steps} steps); "
            f"calls of {self.chunk_mib:.0f} MiB"
        )


@dataclass(frozen=True, slots=True)
class FirstSlot:
    """Times from before the pool is made: until its thread was started, and until a slot could be used."""

    pool_gib: int
    made_ms: float
    first_slot_ms: float


class Registering:
    """Registers populated memory piece by piece, and unregisters it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self._address, self._num_bytes = address, num_bytes
        self._registrar = CudaRegistrar()
        self._ranges: list[tuple[int, int]] = []

    def run(self, pace: Pace) -> float:
        """Register and unregister everything. Returns the seconds that this took."""
        began, offset = time.perf_counter(), 0
        while offset < self._num_bytes:
            size = min(pace.chunk_bytes // SLOT_BYTES * SLOT_BYTES or SLOT_BYTES, self._num_bytes - offset)
            started = time.perf_counter()
            self._registrar.register(self._address + offset, size)
            pace.record(size, time.perf_counter() - started, time.monotonic())
            self._ranges.append((self._address + offset, size))
            offset += size
            while (seconds := pace.delay(time.monotonic())) > 0:
                time.sleep(seconds)
        return time.perf_counter() - began

    def undo(self) -> None:
        while self._ranges:
            self._registrar.unregister(*self._ranges.pop())


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
    registering, steps, seconds = Registering(region.address, region.num_bytes), list[float](), 0.0
    for _ in range(rounds):
        pace = make_pace()
        with DecodeLoop() as loop:
            seconds += registering.run(pace)
            steps += loop.take()
        registering.undo()
    rate = rounds * region.num_bytes / GIB / seconds
    return Measured(name, rate, summarize(steps), pace.chunk_bytes / MIB)


def register_cold(name: str, num_bytes: int) -> Measured:
    """Register memory that was never touched, with one call and without huge pages."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(_MADV_NOHUGEPAGE)
    anchor = ctypes.c_char.from_buffer(memory)
    registering = Registering(ctypes.addressof(anchor), num_bytes)
    with DecodeLoop() as loop:
        seconds = registering.run(FixedPace(num_bytes, 0.0, HostSteps()))
        measured = Measured(name, num_bytes / GIB / seconds, summarize(loop.take()))
    registering.undo()
    del anchor
    memory.close()
    return measured


def pin_pool(name: str, num_bytes: int, **pace: Any) -> Measured:
    """Populate and register a whole pool of KVStow."""
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


def measure(num_bytes: int, say: Callable[[object], None]) -> list[Measured]:
    """Measure all ways. The machine's memory is cold at first: a virtual machine gets it from its host at first
    touch."""
    measured: list[Measured] = []

    def add(entry: Measured) -> None:
        measured.append(entry)
        say(entry)

    add(idle(5.0, "idle"))
    add(pin_pool("KVStow, adaptive, cold machine", num_bytes))
    add(pin_pool("KVStow, adaptive", num_bytes))
    add(pin_pool("KVStow, fixed 64 MiB + 2 ms", num_bytes, chunk_bytes=64 * MIB, pause=0.002))
    with populated(num_bytes) as region:
        add(register_populated("one call, populated", region, lambda: FixedPace(num_bytes, 0.0, HostSteps())))
        add(register_populated("64 MiB back to back, populated", region, lambda: FixedPace(64 * MIB, 0.0, HostSteps())))
        add(
            register_populated(
                "fixed 64 MiB + 2 ms, populated", region, lambda: FixedPace(64 * MIB, 0.002, HostSteps())
            )
        )
        add(register_populated("adaptive, populated", region, lambda: AdaptivePace(0.001, HostSteps())))
        add(register_populated("adaptive 0.5 ms, populated", region, lambda: AdaptivePace(0.0005, HostSteps())))
        add(register_populated("adaptive 2 ms, populated", region, lambda: AdaptivePace(0.002, HostSteps())))
    add(register_cold("one call, small pages never touched", num_bytes))
    add(idle(5.0, "idle again"))
    return measured


def draw(measured: list[Measured], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    names = [f"{entry.name} ({entry.gib_per_second:.1f} GiB/s)" for entry in measured]
    for label, values in (
        ("longest", [entry.latencies.longest for entry in measured]),
        ("p99.9", [entry.latencies.p999 for entry in measured]),
        ("p50", [entry.latencies.p50 for entry in measured]),
    ):
        axes.barh(names, values, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("step of 40 kernels, ms")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=80)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=16, help="memory to pin")
    parser.add_argument(
        "--pools", type=int, nargs="*", default=[1, 16, 64], metavar="GIB", help="pools for the first slot"
    )
    options = parser.parse_args()
    out = Path(os.environ.get("OUT", "."))
    torch.zeros(1, device="cuda")
    say = partial(print, flush=True)
    first = [first_slot(gib) for gib in options.pools]
    say(first)
    measured = measure(options.gib * GIB, say)
    first_warm = [first_slot(gib) for gib in options.pools]
    say(first_warm)
    figures = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "gib": options.gib,
        "ways": [asdict(entry) for entry in measured],
        "first_slot_cold": [asdict(entry) for entry in first],
        "first_slot": [asdict(entry) for entry in first_warm],
    }
    (out / "pinning.json").write_text(json.dumps(figures, indent=1))
    draw(measured, out / "pinning.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
