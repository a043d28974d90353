"""What moving 2 GiB costs the host, and how it slows matmuls that run beside it.

    python3 -m bench.gpu.submit [--gib 2] [--out DIR]

Host time is what the copy thread spends in calls of the device: those that give it work, and those that only poll it.
Writes `submit.json` and `submit.png`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from bench.gpu import figures
from bench.gpu.plain import PlainCopies
from bench.gpu.rank import BOTH, GIB, KIB, KVCache, Shape, Traffic
from bench.report import Table, verdict
from kvstow.devices.base import Fence
from kvstow.devices.cuda import CudaDevice
from kvstow.devices.cuda.copier import Transfer
from kvstow.messages import Direction

SHAPES = (
    Shape(4 * KIB, 80),
    Shape(8 * KIB, 80),
    Shape(256 * KIB, 8),  # this and the next two have slots of 2 MiB, and more and more layers
    Shape(64 * KIB, 32),
    Shape(16 * KIB, 128),
    Shape(1024 * KIB, 32),
)
BAR_MS = 3.0

_BESIDE = Shape(64 * KIB, 32)
_REPEATS = 9
_MATMULS, _SIZE = 60, 8192  # they take 85 ms
_OPS = 6  # ops of 2 GiB take 240 ms, which is longer than the matmuls with those that warm up the GPU before them

_Value = TypeVar("_Value")
_new_event: Any = torch.cuda.Event  # untyped in torch


@dataclass(frozen=True, slots=True)
class HostTime:
    """Medians for one op that moves everything, in milliseconds. `cpu_ms` is CPU time of the whole process."""

    page_kib: int
    layers: int
    way: str
    direction: str
    caller_ms: float  # the time in `submit`
    giving_ms: float
    looking_ms: float
    looks: float
    cpu_ms: float


@dataclass(frozen=True, slots=True)
class SlowDown:
    """How much copies slow down `_MATMULS` products of bf16 matrices: the median and the extremes of the ratio of their
    time to that without copies, measured just before and after."""

    way: str
    direction: str
    median: float
    least: float
    most: float


class Meter:
    """Adds up the seconds of calls. A look counts as giving work if it begins a batch, and as polling otherwise."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.giving = self.looking = 0.0
        self.looks = 0

    def give(self, call: Callable[..., _Value], *arguments: Any) -> _Value:
        started = time.perf_counter()
        value = call(*arguments)
        self.giving += time.perf_counter() - started
        return value

    def look(self, advance: Callable[[], None], transfers: Sequence[Transfer]) -> None:
        """Make a look, and count its time. `transfers` are those in progress."""
        begun, started = sum(transfer.begun for transfer in transfers), time.perf_counter()
        advance()
        seconds = time.perf_counter() - started
        if sum(transfer.begun for transfer in transfers) > begun:
            self.giving += seconds
        else:
            self.looking += seconds
            self.looks += 1


class MeteredDevice:
    """A CUDA device whose calls are timed."""

    def __init__(self, meter: Meter, *arguments: Any, **keywords: Any) -> None:
        self._meter, self._device = meter, CudaDevice(*arguments, **keywords)
        self.name, self.copies_alone = self._device.name, self._device.copies_alone
        self._transfers: list[Transfer] = []

    def launch_store(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> Transfer:
        return self._begun(self._meter.give(self._device.launch_store, op_id, blocks, slots, after))

    def launch_load(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> Transfer:
        return self._begun(self._meter.give(self._device.launch_load, op_id, blocks, slots, after))

    def advance(self) -> None:
        self._meter.look(self._device.advance, self._transfers)
        self._transfers = [transfer for transfer in self._transfers if transfer.finished < transfer.num_batches]

    def _begun(self, transfer: Transfer) -> Transfer:
        self._transfers.append(transfer)
        return transfer

    def close(self) -> None:
        self._device.close()


def host_times(shape: Shape, num_bytes: int) -> list[HostTime]:
    cache, meter = KVCache(shape, num_bytes), Meter()
    with cache.worker(partial(MeteredDevice, meter)) as traffic:
        times = [_host_time(shape, "KVStow", name, partial(_run_op, traffic, meter, name)) for name in BOTH]
    with cache.pool() as (pool, _):
        plain = PlainCopies(cache, pool)
        return times + [_host_time(shape, "batch", name, partial(_run_batch, plain, name)) for name in BOTH]


def _host_time(shape: Shape, way: str, direction: Direction, run: Callable[[], Sequence[float]]) -> HostTime:
    run()
    medians = np.median([run() for _ in range(_REPEATS)], axis=0).tolist()
    return HostTime(shape.page_bytes // KIB, shape.layers, way, direction, *medians)


def _run_op(traffic: Traffic, meter: Meter, direction: Direction) -> Sequence[float]:
    """Run an op. Returns the figures of a `HostTime`."""
    meter.reset()
    started, cpu = time.perf_counter(), time.process_time()
    traffic.submit(direction)
    submitted = time.perf_counter()
    traffic.finish()
    cpu = time.process_time() - cpu
    return 1e3 * (submitted - started), 1e3 * meter.giving, 1e3 * meter.looking, meter.looks, 1e3 * cpu


def _run_batch(plain: PlainCopies, direction: Direction) -> Sequence[float]:
    """Return the same figures for one call. Waiting in CUDA keeps a CPU busy, so only the call's own CPU time
    counts."""
    started, cpu = time.perf_counter(), time.process_time()
    plain.give(direction, plain.pages)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    plain.wait()
    return 1e3 * seconds, 1e3 * seconds, 0.0, 0, 1e3 * cpu


def slow_downs(num_bytes: int) -> list[SlowDown]:
    """Measure the ways by turns, each between two baselines, because the GPU's clock drifts with its temperature."""
    cache = KVCache(_BESIDE, num_bytes)
    with cache.worker() as traffic, cache.pool() as (pool, _):
        plain = PlainCopies(cache, pool)
        ways: dict[tuple[str, Direction], tuple[Callable[[], None], Callable[[], None]]] = {}
        for direction in BOTH:
            submit = partial(traffic.submit, *[direction] * _OPS)
            ways["KVStow", direction] = submit, traffic.finish
            ways["batch", direction] = partial(_give_batches, plain, direction), plain.wait
        matmuls = Matmuls()
        ratios: dict[tuple[str, Direction], list[float]] = {way: [] for way in ways}
        before = matmuls.seconds()
        for _ in range(_REPEATS):
            for way, (begin, finish) in ways.items():
                beside = matmuls.seconds(begin)
                finish()
                after = matmuls.seconds()
                ratios[way].append(2 * beside / (before + after))
                before = after
    return [SlowDown(*way, statistics.median(found), min(found), max(found)) for way, found in ratios.items()]


def _give_batches(plain: PlainCopies, direction: Direction) -> None:
    for _ in range(_OPS):
        plain.give(direction, plain.pages)


class Matmuls:
    def __init__(self) -> None:
        self._factor = torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16)
        self._product = torch.empty_like(self._factor)
        self.seconds()  # a warm-up, which loads kernels

    def seconds(self, begin: Callable[[], None] = lambda: None) -> float:
        """Return the device's seconds for all products. As many products come before them and are not timed, because a
        GPU that was idle is faster at first. `begin` is called as soon as all are queued."""
        start, stop = (_new_event(enable_timing=True) for _ in range(2))
        self._queue()
        start.record()
        self._queue()
        stop.record()
        begin()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def _queue(self) -> None:
        for _ in range(_MATMULS):
            torch.matmul(self._factor, self._factor, out=self._product)


def tables(times: Sequence[HostTime], slowed: Sequence[SlowDown]) -> tuple[Table, Table]:
    head = ["page x layers, direction", "caller", "giving work", "bar 3 ms", "looking (looks)", "CPU, all threads"]
    head += ["one cuMemcpyBatchAsync", "its CPU"]
    plain = {(time.page_kib, time.layers, time.direction): time for time in times if time.way == "batch"}
    rows = [_row(time, plain[time.page_kib, time.layers, time.direction]) for time in times if time.way == "KVStow"]
    beside = [
        [entry.way, f"{entry.direction}s", f"{entry.median:.3f}", f"{entry.least:.3f} to {entry.most:.3f}"]
        for entry in slowed
    ]
    return (
        Table("Host time to move everything, ms", head, rows),
        Table(f"Time of {_MATMULS} matmuls, to that without copies", ["way", "beside", "median", "range"], beside),
    )


def _row(time: HostTime, plain: HostTime) -> list[str]:
    ours = [f"{time.caller_ms:.3f}", f"{time.giving_ms:.2f}", verdict(time.giving_ms <= BAR_MS)]
    ours += [f"{time.looking_ms:.2f} ({time.looks:.0f})", f"{time.cpu_ms:.1f}"]
    return [
        f"{time.page_kib} KiB x {time.layers}, {time.direction}",
        *ours,
        f"{plain.giving_ms:.1f}",
        f"{plain.cpu_ms:.1f}",
    ]


def draw(times: Sequence[HostTime], slowed: Sequence[SlowDown], path: Path) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained")
    names = [f"{time.page_kib} KiB x {time.layers}, {time.direction}" for time in times if time.way == "KVStow"]
    giving = {way: [time.giving_ms for time in times if time.way == way] for way in ("KVStow", "batch")}
    left.plot(giving["batch"], names, "s", label="one cuMemcpyBatchAsync")
    left.plot(giving["KVStow"], names, "o", label="KVStow")
    left.axvline(BAR_MS, color="black", linestyle="--", linewidth=0.8, label="bar")
    left.set_xscale("log")
    left.set_xlabel("host time to give the device 2 GiB, ms")
    left.invert_yaxis()
    labels = [f"{entry.way},\n{entry.direction}s beside" for entry in slowed]
    middle = [entry.median for entry in slowed]
    errors = [[entry.median - entry.least for entry in slowed], [entry.most - entry.median for entry in slowed]]
    right.errorbar(middle, labels, xerr=errors, fmt="o", capsize=3)
    right.axvline(1.0, color="black", linewidth=0.8)
    right.set_xlabel("time of matmuls beside copies, to that without (median, range)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.savefig(path, dpi=70)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="bytes that each measurement moves")
    figures.add_folder(parser)
    options = parser.parse_args(argv)
    num_bytes = int(options.gib * GIB)
    times = [time for shape in SHAPES for time in host_times(shape, num_bytes)]
    slowed = slow_downs(num_bytes)
    figures.write(options.out / "submit.json", host_times=times, slow_downs=slowed)
    figures.show(*tables(times, slowed))
    draw(times, slowed, options.out / "submit.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
