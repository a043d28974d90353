"""How long a 4-byte copy to the host, such as that of a sampled token, takes while a store of 1 GiB runs, and how long
one to the device takes while a load does.

    python3 -m bench.gpu.token [--samples 300] [--out DIR]

Each op has one sample, at a random time, on the sampler's own stream. Its time is from the call of the copy until the
host knows that the copy has ended. Writes `token.json` and `token.png`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu import figures
from bench.gpu.plain import PlainCopies
from bench.gpu.rank import BOTH, GIB, KIB, MIB, KVCache, Shape
from bench.report import Table
from kvstow.devices.cuda import CudaOptions
from kvstow.messages import Direction

SHAPE = Shape(64 * KIB, 32)
_SIZES: list[dict[str, Any]] = [{"staging_bytes": size * MIB} for size in (48, 64, 32, 16)]
_LOADS: list[dict[str, Any]] = [{"loads_ahead": number} for number in (64, 2)]
WAYS: dict[Direction, list[dict[str, Any]]] = {
    "store": [*_SIZES, {"strategy": "direct"}],
    "load": [*_LOADS, *({"strategy": "direct"} | way for way in _LOADS)],
}

_NUM_BYTES = GIB
_WARM_UP, _TIMED = 3, 20

_new_stream: Any = torch.cuda.Stream  # untyped in torch


@dataclass(frozen=True, slots=True)
class Delays:
    """`gb_per_second` is the op's rate without a sampler. Samples are in milliseconds, in ascending order."""

    direction: Direction
    way: str
    gb_per_second: float
    samples: list[float]

    def percentile(self, share: float) -> float:
        return self.samples[min(len(self.samples) - 1, int(share * len(self.samples)))]


class Sampler:
    def __init__(self, direction: Direction) -> None:
        self._stream = _new_stream()
        self._source, self._target = torch.ones(1, device="cuda"), torch.zeros(1).pin_memory()
        if direction == "load":
            self._source, self._target = self._target, self._source
        torch.cuda.synchronize()
        for _ in range(100):
            self.milliseconds()

    def milliseconds(self) -> float:
        started = time.perf_counter()
        with torch.cuda.stream(self._stream):
            self._target.copy_(self._source, non_blocking=True)
        self._stream.synchronize()
        return 1e3 * (time.perf_counter() - started)


def delays(
    direction: Direction, way: str, begin: Callable[[], None], finish: Callable[[], None], samples: int
) -> Delays:
    """Sample ops. `begin` starts an op of all bytes, and `finish` waits for it. Samples begin in its first nine
    tenths."""

    def once() -> float:
        started = time.perf_counter()
        begin()
        finish()
        return time.perf_counter() - started

    for _ in range(_WARM_UP):
        once()
    seconds = statistics.median(once() for _ in range(_TIMED))
    sampler, chance, found = Sampler(direction), random.Random(0), list[float]()
    for _ in range(samples):
        due = time.perf_counter() + 0.9 * seconds * chance.random()
        begin()
        time.sleep(max(0.0, due - time.perf_counter()))
        found.append(sampler.milliseconds())
        finish()
    return Delays(direction, way, _NUM_BYTES / seconds / 1e9, sorted(found))


def measure(samples: int) -> list[Delays]:
    cache, measured = KVCache(SHAPE, _NUM_BYTES), list[Delays]()
    for direction in BOTH:
        sampler = Sampler(direction)
        measured.append(Delays(direction, "nothing", 0.0, sorted(sampler.milliseconds() for _ in range(samples))))
        for way in WAYS[direction]:
            with cache.worker(**way) as traffic:
                begin = partial(traffic.submit, direction)
                measured.append(delays(direction, _name(direction, way), begin, traffic.finish, samples))
        with cache.pool() as (pool, _):
            plain = PlainCopies(cache, pool)
            begin = partial(plain.give, direction, plain.pages)
            measured.append(delays(direction, "one cuMemcpyBatchAsync of all pages", begin, plain.wait, samples))
    return measured


def _name(direction: Direction, way: dict[str, Any]) -> str:
    options = CudaOptions(**way)
    strategy = "direct" if options.strategy == "direct" else "staged"
    ahead = options.num_buffers if direction == "store" else options.loads_ahead
    return f"KVStow, {strategy}, batches of {options.staging_bytes // MIB} MiB, {ahead} at a time"


def table(measured: Sequence[Delays]) -> Table:
    rows = [
        [
            entry.direction,
            entry.way,
            f"{entry.gb_per_second:.1f}" if entry.gb_per_second else "",
            *(f"{entry.percentile(share):.3f}" for share in (0.5, 0.99, 1.0)),
        ]
        for entry in measured
    ]
    head = ["beside a", "way", "its rate, GB/s", "p50", "p99", "longest"]
    return Table("A 4-byte copy beside an op of 1 GiB in the same direction, ms", head, rows)


def draw(measured: Sequence[Delays], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for entry in (entry for entry in measured if entry.direction == "store"):
        shares = [100 * (number + 1) / len(entry.samples) for number in range(len(entry.samples))]
        axes.step(entry.samples, shares, where="post", label=entry.way)
    axes.set_xscale("log")
    axes.set_xlabel("delay of a 4-byte copy to the host, ms")
    axes.set_ylabel("samples not above, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")
    figure.savefig(path, dpi=75)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=300)
    figures.add_folder(parser)
    options = parser.parse_args(argv)
    measured = measure(options.samples)
    figures.write(options.out / "token.json", delays=measured)
    figures.show(table(measured))
    draw(measured, options.out / "token.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
