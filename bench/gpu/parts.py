"""Measures which part of pinning slows an eager engine: the parts run one at a time beside steps of thousands of
launches.

    OUT=/tmp/out python -m bench.gpu.parts [--rounds 5] [--steps 12] [--only NAME ...] [--tiny]

The main thread makes the steps, as in an engine whose worker shares its process. Steps with a part alternate with steps
without it, a few at a time, because a shared machine changes its speed within seconds. All parts have the same rate, so
their costs can be compared. `--tiny` tries the program without a GPU. Writes `parts.json`.
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

import numpy as np
import torch

from bench.report import Table
from kvstow.config import PoolConfig
from kvstow.memory import region
from kvstow.memory.hostpool import HostPool
from kvstow.memory.limits import MemoryLimits
from kvstow.memory.pinning import PopulateOnly, Registrar
from kvstow.memory.region import HostRegion

GIB, MIB = 1 << 30, 1 << 20
SLOT_BYTES = 5 * MIB // 4  # 80 layers of 8 KiB pages
_CHUNK = 40 * MIB
_RATE = 1.5 * GIB


@dataclass(frozen=True, slots=True)
class Felt:
    """Milliseconds of the steps without and with the part, as medians of the rounds. `ratio` is the median of the
    rounds' own ratios. `gib_per_second` is the part's rate while it worked."""

    name: str
    alone: float
    beside: float
    ratio: float
    p99_longer: float
    longest: float
    gib_per_second: float


class EagerSteps:
    """Steps of an eager engine: each makes some thousand launches of small kernels, then waits for a token."""

    def __init__(self, device: str, layers: int) -> None:
        self._layers, self._device = layers, device
        self._hidden = torch.randn(1, 1024, device=device)
        self._weight = torch.randn(1024, 1024, device=device)
        self.begins: Callable[[], None] = lambda: None
        self.launched: Callable[[], None] = lambda: None

    def step(self) -> float:
        """Make a step, and return its milliseconds."""
        began = time.perf_counter()
        self.begins()
        hidden = self._hidden
        for _ in range(self._layers):
            normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5)
            for _ in range(4):
                projected = normed @ self._weight
                query, key = projected.view(1, 8, 128).chunk(2, dim=1)
                projected = torch.cat((query * 0.5, key + 1.0), dim=1).view(1, 1024)
                hidden = hidden + torch.nn.functional.silu(projected) * 0.01
        self.launched()
        float(hidden[0, 0])  # waits for the device
        time.sleep(0.001)  # stands for the scheduler and the client
        return (time.perf_counter() - began) * 1e3


class Part:
    """Makes the same call again and again, on its own thread, while it is switched on."""

    def __init__(self, work: Callable[[], int], seconds: float) -> None:
        """`work` returns how many bytes it has moved. It is called every `seconds`."""
        self.moved = 0
        self._work, self._seconds = work, seconds
        self._on, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def switch(self, on: bool) -> None:
        (self._on.set if on else self._on.clear)()

    def close(self) -> None:
        self._stop.set()
        self._on.set()
        self._thread.join()

    def _run(self) -> None:
        while self._on.wait() and not self._stop.is_set():
            began = time.monotonic()
            self.moved += self._work()
            self._stop.wait(max(0.0, began + self._seconds - time.monotonic()))


class PoolPart:
    """A whole pool, which grows while it is switched on."""

    def __init__(self, pool: HostPool, steps: EagerSteps | None) -> None:
        self._pool = pool
        if steps is not None:
            steps.begins, steps.launched = pool.steps.begin, pool.steps.launched
        pool.set_paused(True)
        pool.start()

    @property
    def moved(self) -> int:
        return self._pool.status().pinned_bytes

    def switch(self, on: bool) -> None:
        self._pool.set_paused(not on)

    def close(self) -> None:
        self._pool.close()


class Memory:
    """Populated memory, which is used piece by piece from the start."""

    def __init__(self, num_bytes: int, *, is_populated: bool) -> None:
        self.region = HostRegion(num_bytes)
        if is_populated:
            self.region.commit(0, num_bytes, plenty=True, threads=4)
        self.registered: list[int] = []
        self._offset = 0

    def next(self) -> int:
        """Return the offset of the next piece. After the last piece comes the first one again."""
        offset = self._offset
        self._offset = (offset + _CHUNK) % (self.region.num_bytes - _CHUNK)
        return offset


def spin() -> int:
    """Run Python for 1 ms."""
    end = time.perf_counter() + 0.001
    while time.perf_counter() < end:
        pass
    return 0


@contextmanager
def parts(name: str, registrar: Registrar, steps: EagerSteps, num_bytes: int) -> Iterator[Any]:
    seconds = _CHUNK / _RATE
    populated = name.startswith(("register", "nodes"))
    memory = (
        None if name.startswith(("pool", "python", "limits", "wake")) else Memory(num_bytes, is_populated=populated)
    )
    part: Any
    if name.startswith("pool"):
        part = PoolPart(HostPool(PoolConfig(SLOT_BYTES, num_bytes), registrar), None if "blind" in name else steps)
    elif memory is None:
        work = {"python": spin, "limits": lambda: MemoryLimits().shortage(1) is None and 0, "wake": lambda: 0}[name]
        part = Part(work, {"python": seconds, "limits": seconds, "wake": 0.001}[name])
    else:
        part = Part(_work(name, memory, registrar), seconds)
    try:
        yield part
    finally:
        part.close()
        steps.begins = steps.launched = lambda: None
        if memory is not None:
            for start in memory.registered:
                registrar.unregister(start, _CHUNK)
            memory.region.close()


def _work(name: str, memory: Memory, registrar: Registrar) -> Callable[[], int]:
    address, following = memory.region.address, memory.next

    def protect() -> int:
        region.libc.mprotect(address + following(), _CHUNK, 3)
        return _CHUNK

    def commit(plenty: bool) -> int:
        offset = following()
        memory.region.commit(offset, _CHUNK, plenty=plenty)
        return _CHUNK

    def register() -> int:
        if not memory.registered:
            registrar.prepare_thread()
        start = address + following()
        registrar.register(start, _CHUNK)
        memory.registered.append(start)
        return _CHUNK

    def nodes() -> int:
        region.bytes_by_node(address + following(), _CHUNK)
        return _CHUNK

    return {
        "mprotect": protect,
        "touch": lambda: commit(True),
        "populate": lambda: commit(False),
        "register": register,
        "nodes": nodes,
    }[name.split()[0]]


NAMES = (
    "nothing",
    "python",
    "wake",
    "limits",
    "mprotect",
    "touch",
    "populate",
    "nodes",
    "register",
    "pool",
    "pool blind",
)


def measure(name: str, registrar: Registrar, steps: EagerSteps, num_bytes: int, rounds: int, count: int) -> Felt:
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    moved, seconds = 0, 0.0
    with parts("python" if name == "nothing" else name, registrar, steps, num_bytes) as part:
        for _ in range(rounds):
            alone.append([steps.step() for _ in range(count)])
            before, began = part.moved, time.perf_counter()
            part.switch(name != "nothing")
            beside.append([steps.step() for _ in range(count)])
            part.switch(False)
            moved, seconds = moved + part.moved - before, seconds + time.perf_counter() - began
            steps.step()  # lets the part end
    ratios = [np.median(late) / np.median(early) for early, late in zip(alone, beside, strict=True)]
    all_alone, all_beside = np.concatenate(alone), np.concatenate(beside)
    return Felt(
        name,
        float(np.median(all_alone)),
        float(np.median(all_beside)),
        float(np.median(ratios)),
        float(np.percentile(all_beside, 99) - np.percentile(all_alone, 99)),
        float(all_beside.max()),
        moved / GIB / seconds,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="of a round, with a part and without")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--tiny", action="store_true", help="tries the program, on the CPU; measures nothing")
    options = parser.parse_args()
    num_bytes = GIB // 4 if options.tiny else 8 * GIB
    if options.tiny:
        registrar: Registrar = PopulateOnly()
    else:
        from kvstow.devices.cuda import CudaRegistrar

        torch.zeros(1, device="cuda")
        registrar = CudaRegistrar()
    steps = EagerSteps("cpu" if options.tiny else "cuda", 2 if options.tiny else 80)
    for _ in range(5):
        steps.step()
    felt = []
    for name in options.only:
        felt.append(measure(name, registrar, steps, num_bytes, options.rounds, options.steps))
        print(felt[-1], flush=True)
    (Path(os.environ.get("OUT", ".")) / "parts.json").write_text(json.dumps([asdict(one) for one in felt], indent=1))
    rows = [
        [
            one.name,
            f"{one.alone:.1f}",
            f"{one.beside:.1f}",
            f"{one.ratio:.3f}",
            f"{one.p99_longer:+.1f}",
            f"{one.gib_per_second:.2f}",
        ]
        for one in felt
    ]
    head = ["part", "steps alone, p50 ms", "beside it", "ratio", "p99 longer, ms", "GiB/s"]
    print(Table("Parts of pinning beside eager steps", head, rows).to_markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
