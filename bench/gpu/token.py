"""How long a 4-byte copy to the host, say of a sampled token, takes while a store of 1 GiB runs.

    python3 -m bench.gpu.token [--samples 300] [--out DIR]

One sample a store, at a random time of it, on a stream of the sampler's own: from the call of the copy until the
host has its bytes. Writes `token.json` and `token.png`.
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
from bench.gpu.rank import GIB, KIB, MIB, KVCache, Shape
from bench.report import Table

SHAPE = Shape(64 * KIB, 32)
STAGING = (48 * MIB, 64 * MIB, 32 * MIB, 16 * MIB)  # the first, staged, is what a user gets

_NUM_BYTES = GIB
_WARM_UP, _TIMED = 3, 20

_new_stream: Any = torch.cuda.Stream  # untyped in torch


@dataclass(frozen=True, slots=True)
class Delays:
    """`gb_per_second`: the store's rate without a sampler. Samples in milliseconds, ascending."""

    way: str
    gb_per_second: float
    samples: list[float]

    def percentile(self, share: float) -> float:
        return self.samples[min(len(self.samples) - 1, int(share * len(self.samples)))]


class Sampler:
    def __init__(self) -> None:
        self._stream = _new_stream()
        self._token, self._host = torch.ones(1, device="cuda"), torch.zeros(1).pin_memory()
        torch.cuda.synchronize()
        for _ in range(100):
            self.milliseconds()

    def milliseconds(self) -> float:
        started = time.perf_counter()
        with torch.cuda.stream(self._stream):
            self._host.copy_(self._token, non_blocking=True)
        self._stream.synchronize()
        return 1e3 * (time.perf_counter() - started)


def delays(way: str, begin: Callable[[], None], finish: Callable[[], None], samples: int) -> Delays:
    """`begin` starts a store of all bytes, `finish` waits for it. Samples begin in its first nine tenths."""

    def store() -> float:
        started = time.perf_counter()
        begin()
        finish()
        return time.perf_counter() - started

    for _ in range(_WARM_UP):
        store()
    seconds = statistics.median(store() for _ in range(_TIMED))
    sampler, chance, found = Sampler(), random.Random(0), list[float]()
    for _ in range(samples):
        due = time.perf_counter() + 0.9 * seconds * chance.random()
        begin()
        time.sleep(max(0.0, due - time.perf_counter()))
        found.append(sampler.milliseconds())
        finish()
    return Delays(way, _NUM_BYTES / seconds / 1e9, sorted(found))


def measure(samples: int) -> list[Delays]:
    cache = KVCache(SHAPE, _NUM_BYTES)
    sampler = Sampler()
    measured = [Delays("no store", 0.0, sorted(sampler.milliseconds() for _ in range(samples)))]
    for strategy, staging in [("staged", size) for size in STAGING] + [("direct", STAGING[0])]:
        name = f"KVStow, {strategy}, batches of {staging // MIB} MiB"
        with cache.worker(strategy=strategy, staging_bytes=staging) as traffic:
            measured.append(delays(name, partial(traffic.submit, "store"), traffic.finish, samples))
    with cache.pool() as (pool, _):
        plain = PlainCopies(cache, pool)
        begin = partial(plain.give, "store", plain.pages)
        measured.append(delays("one cuMemcpyBatchAsync of all pages", begin, plain.wait, samples))
    return measured


def table(measured: Sequence[Delays]) -> Table:
    rows = [
        [
            entry.way,
            f"{entry.gb_per_second:.1f}" if entry.gb_per_second else "",
            *(f"{entry.percentile(share):.3f}" for share in (0.5, 0.99, 1.0)),
        ]
        for entry in measured
    ]
    return Table(
        "A 4-byte copy beside a store of 1 GiB, ms", ["store", "its rate, GB/s", "p50", "p99", "longest"], rows
    )


def draw(measured: Sequence[Delays], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for entry in measured:
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
