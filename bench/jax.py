"""Stores and loads of the JAX device, compared with one large copy, and how long its programs take to compile.

    python3 -m bench.jax [copies uncached settings start] [--gib 1] [--out DIR]

It runs on the platform that JAX has: CUDA, or the CPU, where the limit is `np.copyto` of the same bytes. Blocks are 2
MiB in 32 layers. "copies": through the pool, from the submission until the host knows that all copies have ended, and
with tpu-inference's own offload (`bench.jaxupstream`). "uncached": the same with glibc's copies that bypass the cache.
"settings": the same as "copies", by size of pieces and number of threads. "start": the time in which a new process
compiles the device's programs, without and with a compilation cache. Each part has its own process. Writes
`jax-PART.json`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from bench.report import Table, verdict

PARTS = ("copies", "uncached", "settings", "start")
UNCACHED = "glibc.cpu.x86_non_temporal_threshold=1048576"
LAYERS, PAGE = 32, (16, 16, 128)  # of 2 bytes: 64 KiB
BLOCK_BYTES = 2 << 20
BAR, GOAL, UPSTREAM_BAR = 0.5, 0.6, 5.0
COLD_BAR, WARM_BAR = 20.0, 2.0  # seconds without and with a compilation cache

_ROOT = Path(__file__).parents[1]
_REPEATS = 7
_PATIENCE = 60.0  # seconds


class Bench:
    """A KV cache on all devices of this process, and pools for its blocks."""

    def __init__(self, num_bytes: int, dtype: str) -> None:
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        from kvstow.devices.jax import ArrayCell, ShardedKV

        self.jax, self.np = jax, np
        self.num_blocks = max(8, num_bytes // BLOCK_BYTES)
        self.num_bytes = self.num_blocks * BLOCK_BYTES
        self.devices = jax.devices()
        mesh = Mesh(np.array(self.devices), ("model",))
        sharding = NamedSharding(mesh, PartitionSpec(None, None, "model"))
        shape = (self.num_blocks + self.num_blocks // 4, *PAGE)
        width = np.dtype(dtype).itemsize
        if width == 1:
            shape = (*shape[:-1], 2 * shape[-1])
        made = jax.jit(
            lambda: [jax.numpy.full(shape, layer, dtype) for layer in range(LAYERS)], out_shardings=[sharding] * LAYERS
        )
        self.cell = ArrayCell(jax.block_until_ready(made()))
        self.kv = ShardedKV.of(self.cell.peek())
        assert self.kv.layout.slot_bytes == BLOCK_BYTES
        chance = np.random.default_rng(0)
        self.blocks = tuple(chance.permutation(shape[0])[: self.num_blocks].tolist())
        self.slots = tuple(chance.permutation(self.num_blocks).tolist())
        self._ids = count(1)
        self.launch_seconds: list[float] = []
        """How long the host's thread took for each launch of loads, including their transfers to the devices."""

    @contextmanager
    def plane(self, **options: Any) -> Iterator[tuple[Any, Any]]:
        """Yield a data plane whose pool is populated, and its device."""
        from kvstow.config import PoolConfig
        from kvstow.dataplane import DataPlane
        from kvstow.devices.jax import JaxDevice, JaxOptions
        from kvstow.memory.hostpool import HostPool
        from kvstow.memory.pinning import PopulateOnly

        pool = HostPool(PoolConfig(BLOCK_BYTES, self.num_bytes, pause=0.0), PopulateOnly())
        try:
            device = JaxDevice(pool, self.cell, JaxOptions(**options))
        except BaseException:
            pool.close()
            raise
        if device.notice:
            print(device.notice, flush=True)
        plane = DataPlane(0, pool, device, launcher=device)
        try:
            plane.start()
            deadline = time.monotonic() + _PATIENCE
            while pool.pinned_slots < self.num_blocks:
                assert time.monotonic() < deadline, pool.status()
                threading.Event().wait(0.01)
            yield plane, device
        finally:
            plane.close()

    def seconds(self, plane: Any, direction: Any, num_blocks: int) -> float:
        """Return the seconds of one op."""
        from kvstow.control.launchorder import LaunchOrder
        from kvstow.messages import Op, StepPlan

        op = Op(next(self._ids), direction, self.blocks[:num_blocks], self.slots[:num_blocks])
        order = LaunchOrder(1)
        order.expect((op,))
        started = time.perf_counter()
        plane.submit(StepPlan((op,)))
        while True:
            order.note(0, plane.take_staged(), ())
            if launches := order.take():
                before = time.perf_counter()
                plane.submit(StepPlan(launches=launches))
                self.launch_seconds.append(time.perf_counter() - before)
            for completion in plane.take_completions():
                if completion.mark == "failed":
                    raise RuntimeError(completion.error)
                if completion.mark == "done":
                    return time.perf_counter() - started
            plane.wait_completions(0.2e-3)

    def rate(self, plane: Any, direction: Any, num_blocks: int, repeats: int = _REPEATS) -> float:
        """Return the median rate, in bytes per second."""
        self.seconds(plane, direction, num_blocks)
        taken = [self.seconds(plane, direction, num_blocks) for _ in range(repeats)]
        return num_blocks * BLOCK_BYTES / statistics.median(taken)

    def limits(self) -> dict[str, float]:
        """Return the rates of one large copy by direction, in bytes per second."""
        if self.devices[0].platform == "gpu":
            return _link(self.num_bytes)
        source, target = (self.np.ones(self.num_bytes, self.np.uint8) for _ in range(2))
        rate = _rate(lambda: self.np.copyto(target, source), self.num_bytes)
        return {"store": rate, "load": rate}

    def upstream(self) -> dict[str, float]:
        """Return the rates of tpu-inference's own offload, in bytes per second: stores into chunks that it has stored
        before, as in a full cache, stores into new chunks, and loads."""
        from bench.jaxupstream import MOST_BLOCKS, UpstreamOffload

        offload = UpstreamOffload(self.cell)
        blocks = self.blocks[:MOST_BLOCKS]
        moved = len(blocks) * BLOCK_BYTES
        chunks = range(len(blocks))
        offload.store(blocks, chunks)  # compiles the programs
        started = time.perf_counter()
        for number in range(1, _REPEATS + 1):
            offload.store(blocks, range(number * len(blocks), (number + 1) * len(blocks)))
        new = _REPEATS * moved / (time.perf_counter() - started)
        return {
            "store": _rate(lambda: offload.store(blocks, chunks), moved),
            "store, new chunks": new,
            "load": _rate(lambda: offload.load(blocks, chunks), moved),
        }

    def pieces(self, plane: Any, device: Any) -> dict[str, float]:
        """Time the parts of a store separately: gathers with their transfer to pinned memory, and the copies from there
        to the pool by number of threads."""
        from kvstow.devices.jax.hostcopies import Range, RangeCopier

        jax, np = self.jax, self.np
        chosen = list(self.blocks[: min(self.num_blocks, 8 * device._most)])

        def gather() -> list[Any]:
            gathered = device.gather(chosen)
            device.launch_rest()
            pieces = list(gathered.launched)
            assert not gathered.num_unlaunched
            jax.block_until_ready([piece.arriving for piece in pieces])
            return pieces

        found = {"gather and its way to the host": _rate(gather, len(chosen) * BLOCK_BYTES)}
        columns = [np.ascontiguousarray(rows) for piece in gather() for rows in piece.arriving]
        ranges, target = [], plane.pool.address
        for column in columns:
            for row in range(len(column)):
                size = column.itemsize * column.shape[1]
                ranges.append(Range(target, column.ctypes.data + row * size, size))
                target += size
        ranges = [one for one in ranges if one.target + one.num_bytes <= plane.pool.address + self.num_bytes]
        moved = sum(one.num_bytes for one in ranges)
        for threads in (1, 2, 4, 8, 12):
            if threads <= 2 * (os.cpu_count() or 1):
                copier = RangeCopier(threads)
                found[f"host to pool, {threads} threads"] = _rate(partial(_copy_all, copier, ranges), moved)
                copier.close()
        return found


def _rate(copy: Callable[[], object], num_bytes: int) -> float:
    copy()
    taken = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        copy()
        taken.append(time.perf_counter() - started)
    return num_bytes / statistics.median(taken)


def _copy_all(copier: Any, ranges: Any) -> None:
    copier.start(ranges).result()


def _link(num_bytes: int) -> dict[str, float]:
    """Return the rate of the first GPU's link, measured between memory that the driver has allocated."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        status = getattr(cuda, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed: {status}")

    context, device, host = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
    size = ctypes.c_size_t(num_bytes)
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxPushCurrent_v2", context)
    call("cuMemAlloc_v2", ctypes.byref(device), size)
    call("cuMemHostAlloc", ctypes.byref(host), size, 0)
    rates = {
        "store": _rate(lambda: call("cuMemcpyDtoH_v2", host, device, size), num_bytes),
        "load": _rate(lambda: call("cuMemcpyHtoD_v2", device, host, size), num_bytes),
    }
    call("cuMemFreeHost", host)
    call("cuMemFree_v2", device)
    call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    return rates


def copies(num_bytes: int, dtype: str) -> dict[str, Any]:
    from kvstow.devices.jax.hostcopies import cached_copy_bytes

    bench = Bench(num_bytes, dtype)
    limits = bench.limits()
    print(limits, flush=True)
    sizes = sorted({1, 16, 64, bench.num_blocks})
    rates: list[dict[str, Any]] = []
    with bench.plane() as (plane, device):
        first = {way: bench.seconds(plane, way, bench.num_blocks) for way in ("store", "load")}
        for number in sizes:
            for way in ("store", "load"):
                rates.append({"blocks": number, "way": way, "rate": bench.rate(plane, way, number)})
                print(rates[-1], flush=True)
        bench.launch_seconds.clear()
        bench.rate(plane, "load", bench.num_blocks)
        launching = statistics.median(bench.launch_seconds)
        pieces = bench.pieces(plane, device)
    limits_after = bench.limits()
    return {
        "devices": [str(device) for device in bench.devices],
        "dtype": dtype,
        "cached_copy_bytes": cached_copy_bytes(),
        "limits": limits,
        "limits_after": limits_after,
        "first_op_seconds": first,
        "rates": rates,
        "launch_seconds": launching,
        "pieces": pieces,
        "upstream": bench.upstream(),
    }


def settings(num_bytes: int, dtype: str) -> dict[str, Any]:
    bench = Bench(num_bytes, dtype)
    limits, found = bench.limits(), []
    for piece_mib, threads in ((64, 4), (64, 6), (64, 8), (64, 10), (64, 12), (64, 14), (32, 12), (128, 12)):
        if threads > 2 * (os.cpu_count() or 1):
            continue
        with bench.plane(piece_bytes=piece_mib << 20, copy_threads=threads) as (plane, _):
            rates = {way: bench.rate(plane, way, bench.num_blocks, 5) for way in ("store", "load")}
        found.append({"piece_mib": piece_mib, "threads": threads, **rates})
        print(found[-1], flush=True)
    return {"limits": limits, "settings": found}


def compile_programs(dtype: str) -> float:
    """Return the seconds for compiling the programs."""
    bench = Bench(1 << 28, dtype)
    from kvstow.devices.jax.device import _compiled
    from kvstow.devices.jax.programs import buckets_up_to, copies_rows

    started = time.perf_counter()
    _compiled(bench.kv, buckets_up_to(128, pads_free=copies_rows(bench.kv)))
    return time.perf_counter() - started


def start(dtype: str) -> dict[str, Any]:
    """Compile all programs of each device."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        kept = {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        for name, environment in (("cold", kept), ("warm", kept)):
            command = [sys.executable, "-m", "bench.jax", "compile", "--dtype", dtype]
            process = subprocess.run(command, env=os.environ | environment, check=True, capture_output=True, text=True)
            found[name] = json.loads(process.stdout.splitlines()[-1])
    return found


def tables(part: str, found: dict[str, Any]) -> list[Table]:
    if part == "start":
        bars = {"cold": COLD_BAR, "warm": WARM_BAR}
        rows = [
            [name, f"{found[name]:.1f} s", f"{bar:.0f} s, {verdict(found[name] <= bar)}"] for name, bar in bars.items()
        ]
        return [Table("All programs of each device", ["compilation cache", "compiled in", "bar"], rows)]
    limits = found["limits"]
    if part == "settings":
        rows = [
            [f"{one['piece_mib']} MiB", f"{one['threads']}", *(_share(one[way], limits[way]) for way in limits)]
            for one in found["settings"]
        ]
        return [Table("By setting, GB/s and part of the limit", ["pieces", "threads", "store", "load"], rows)]
    most = max(one["blocks"] for one in found["rates"])
    rows = [
        [f"{one['way']}, {one['blocks']} blocks", _share(one["rate"], limits[one["way"]]), _bar(one, most, limits)]
        for one in found["rates"]
    ]
    store = next(one["rate"] for one in found["rates"] if (one["way"], one["blocks"]) == ("store", most))
    ratio = store / found["upstream"]["store"]
    rows += [[f"limit, {way}", f"{rate / 1e9:.1f}", ""] for way, rate in limits.items()]
    rows += [[f"tpu-inference, {way}", f"{rate / 1e9:.1f}", ""] for way, rate in found["upstream"].items()]
    rows += [["store, to that of tpu-inference", f"{ratio:.1f} x", f"5 x, {verdict(ratio >= UPSTREAM_BAR)}"]]
    rows += [[name, f"{rate / 1e9:.1f}", ""] for name, rate in found["pieces"].items()]
    rows += [["launch of staged pieces", f"{1e3 * found['launch_seconds']:.2f} ms", ""]]
    rows += [[f"first {way}", f"{1e3 * seconds:.0f} ms", ""] for way, seconds in found["first_op_seconds"].items()]
    cached = "an unknown size" if found["cached_copy_bytes"] is None else f"{found['cached_copy_bytes'] >> 20} MiB"
    title = f"{', '.join(found['devices'])}, {found['dtype']}; glibc copies through the cache up to {cached}"
    return [Table(title, ["", "GB/s, part of the limit", "bar"], rows)]


def _share(rate: float, limit: float) -> str:
    return f"{rate / 1e9:.1f}, {rate / limit:.2f}"


def _bar(one: dict[str, Any], most: int, limits: dict[str, float]) -> str:
    share = one["rate"] / limits[one["way"]]
    return f"{BAR}, {verdict(share >= BAR)}; goal {GOAL}, {verdict(share >= GOAL)}" if one["blocks"] == most else ""


def measure(part: str, num_bytes: int, dtype: str) -> dict[str, Any]:
    if part == "start":
        return start(dtype)
    return {"copies": copies, "uncached": copies, "settings": settings}[part](num_bytes, dtype)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "compile", []], help="default: all")
    parser.add_argument("--gib", type=float, default=1.0, help="bytes of the largest op")
    parser.add_argument("--dtype", default="uint16")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), metavar="DIR")
    options = parser.parse_args(argv)
    if options.parts == ["compile"]:
        print(compile_programs(options.dtype))
        return 0
    chosen = os.environ.get("GLIBC_TUNABLES", "")
    if len(options.parts) == 1 and (options.parts != ["uncached"] or UNCACHED in chosen):
        (part,) = options.parts
        found = measure(part, int(options.gib * (1 << 30)), options.dtype)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"jax-{part}.json").write_text(json.dumps(found, indent=1))
        for table in tables(part, found):
            print(f"{table.to_markdown()}\n", flush=True)
        return 0
    paths = [*(str(_ROOT / name) for name in ("engine", "")), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    past_cache = environment | {"GLIBC_TUNABLES": ":".join(filter(None, (chosen, UNCACHED)))}
    shared = ["--gib", f"{options.gib}", "--dtype", options.dtype, "--out", f"{options.out}"]
    ends = []
    for part in options.parts or PARTS:
        command = [sys.executable, "-m", "bench.jax", part, *shared]
        ends.append(subprocess.run(command, env=past_cache if part == "uncached" else environment, check=False))
    return max(end.returncode for end in ends)


if __name__ == "__main__":
    sys.exit(main())
