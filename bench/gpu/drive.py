"""What `drive` costs a host's thread, and how long 16 simultaneous loads take beside it, by the number of batches that
one look may add.

    python3 -m bench.gpu.drive [--gib 2] [--looks 4 8 16 64] [--out DIR]

The host does what vLLM does: it submits 16 loads, drives, and drives again after each step. "waiting": a step is 0.5 ms
of Python, because all requests wait for loads. "graphs": a step launches small kernels for 6 ms. "eager": it does so
for 30 ms, and holds the interpreter meanwhile. A look that may add 64 batches has no limit, because no more can be in
progress. All variants are measured by turns, in one process. Writes `drive.json`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from bench.gpu import figures
from bench.gpu.rank import GIB, KIB, KVCache, Shape, Traffic
from bench.report import Table
from kvstow.messages import Direction

SHAPES = (Shape(64 * KIB, 32), Shape(8 * KIB, 80))
LOOKS = (4, 8, 16, 64)

_LOADS = 16
_ROUNDS = 5
_STEPS = {"waiting": 0.5e-3, "graphs": 6e-3, "eager": 30e-3}  # seconds


@dataclass(frozen=True, slots=True)
class Burst:
    """One time at which all loads were submitted together. `drives` are the seconds of each call."""

    seconds: float
    drives: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Driving:
    """The medians of all rounds, in ms: the time of a burst, and the host's time in `drive` during one. Also the times
    of single calls."""

    shape: str
    host: str
    per_advance: int
    burst_ms: float
    least_ms: float
    gb_per_second: float
    driving_ms: float
    call_p50_ms: float
    call_p99_ms: float
    call_longest_ms: float
    calls: float


class Steps:
    """The host's work between two calls: it launches small kernels for about this long, and waits for them."""

    def __init__(self) -> None:
        self._values = torch.zeros(1024, device="cuda")
        self._launch(1000)
        torch.cuda.synchronize()
        started = time.perf_counter()
        self._launch(5000)
        self._seconds = (time.perf_counter() - started) / 5000
        torch.cuda.synchronize()

    def step(self, host: str) -> Callable[[], None]:
        seconds = _STEPS[host]
        if host == "waiting":
            return lambda: _compute(seconds)
        count = max(1, round(seconds / self._seconds))
        return lambda: self._run(count)

    def _run(self, count: int) -> None:
        self._launch(count)
        torch.cuda.current_stream().synchronize()  # waits only for the host's own work

    def _launch(self, count: int) -> None:
        for _ in range(count):
            self._values.add_(1)


def _compute(seconds: float) -> None:
    """Run Python, as an engine does that checks whether a request can continue."""
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        pass


def burst(traffic: Traffic, step: Callable[[], None]) -> Burst:
    directions: list[Direction] = ["load"] * _LOADS
    drives: list[float] = []
    started = time.perf_counter()
    traffic.submit(*directions)
    _drive(traffic, drives)
    while traffic.is_running():
        step()
        _drive(traffic, drives)
    return Burst(time.perf_counter() - started, tuple(drives))


def _drive(traffic: Traffic, drives: list[float]) -> None:
    started = time.perf_counter()
    traffic.drive()
    drives.append(time.perf_counter() - started)


def measure(shape: Shape, num_bytes: int, looks: Sequence[int]) -> list[Driving]:
    cache, steps = KVCache(shape, num_bytes), Steps()
    with ExitStack() as stack:
        ways = {per_advance: stack.enter_context(cache.worker(loads_per_advance=per_advance)) for per_advance in looks}
        return [
            _summary(shape, host, per_advance, cache.num_bytes, bursts)
            for host in _STEPS
            for per_advance, bursts in by_turns(ways, steps.step(host)).items()
        ]


def by_turns(ways: Mapping[int, Traffic], step: Callable[[], None]) -> dict[int, list[Burst]]:
    bursts: dict[int, list[Burst]] = {per_advance: [] for per_advance in ways}
    for number in range(_ROUNDS + 1):
        for per_advance, traffic in ways.items():
            found = burst(traffic, step)
            if number:  # the first round is a warm-up
                bursts[per_advance].append(found)
    return bursts


def _summary(shape: Shape, host: str, per_advance: int, num_bytes: int, bursts: Sequence[Burst]) -> Driving:
    seconds = float(np.median([found.seconds for found in bursts]))
    calls = np.array([call for found in bursts for call in found.drives])
    p50, p99 = np.percentile(calls, (50, 99)).tolist()
    return Driving(
        str(shape),
        host,
        per_advance,
        1e3 * seconds,
        1e3 * min(found.seconds for found in bursts),
        _LOADS * num_bytes / seconds / 1e9,
        1e3 * float(np.median([sum(found.drives) for found in bursts])),
        1e3 * p50,
        1e3 * p99,
        1e3 * float(calls.max()),
        len(calls) / len(bursts),
    )


def table(found: Sequence[Driving]) -> Table:
    head = ["page x layers, host", "a look adds", "16 loads, ms", "least", "GB/s", "in drive, ms (calls)"]
    head += ["a call: p50", "p99", "longest, ms"]
    rows = [
        [
            f"{entry.shape}, {entry.host}",
            str(entry.per_advance),
            f"{entry.burst_ms:.1f}",
            f"{entry.least_ms:.1f}",
            f"{entry.gb_per_second:.1f}",
            f"{entry.driving_ms:.2f} ({entry.calls:.0f})",
            f"{entry.call_p50_ms:.3f}",
            f"{entry.call_p99_ms:.3f}",
            f"{entry.call_longest_ms:.3f}",
        ]
        for entry in found
    ]
    return Table(f"{_LOADS} loads at once beside a host that drives them", head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="bytes of one load")
    parser.add_argument("--looks", type=int, nargs="+", default=LOOKS, help="values of loads_per_advance")
    figures.add_folder(parser)
    options = parser.parse_args(argv)
    found = [entry for shape in SHAPES for entry in measure(shape, int(options.gib * GIB), options.looks)]
    figures.write(options.out / "drive.json", driving=found)
    figures.show(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
