"""How fast a kernel reads pinned host memory over the link into pages, and what that costs a computation beside it.

    python3 -m bench.gpu.layers [--memfd GIB] [--quick] [--out DIR]

Blocks are in a random order on both sides. "rate": one layer after the other, by the number of thread blocks and of
threads in each. "beside": large matrix products during continuous loads, compared with the same products alone, and the
rate of the loads meanwhile. "forward": a stand-in for a forward pass whose layers wait on the device for their own
pages, compared with one that waits for all pages first. With `--memfd`, "rate" is also measured from this much shared
memory of small and of huge pages, registered in chunks. Writes `layers.json`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstow.devices.cuda.context import primary_context
from kvstow.devices.cuda.copier import machine_code, pointers_to_fields
from kvstow.devices.cuda.layertrial import PIECE_BYTES, PLACE
from kvstow.devices.cuda.plan import PIECE

KIB, GIB = 1 << 10, 1 << 30
SHAPES = ((64 * KIB, 32, 1000), (16 * KIB, 64, 1500), (8 * KIB, 80, 1000), (4 * KIB, 80, 2000))  # page, layers, blocks
GRIDS = ((2, 512), (4, 256), (4, 512), (8, 256), (8, 512), (16, 256), (16, 512), (32, 512))
BESIDE = ((2, 512), (4, 512), (8, 256), (8, 512), (16, 512), (32, 512))
POOL = 5 * GIB
REGISTERED = 256 << 20
_Event: Any = torch.cuda.Event  # untyped in torch
_ExternalStream: Any = torch.cuda.ExternalStream


class Arguments(ctypes.Structure):
    _fields_ = [
        ("pieces", ctypes.c_uint64),
        ("places", ctypes.c_uint64),
        ("num_pieces", ctypes.c_uint32),
        ("num_places", ctypes.c_uint32),
    ]


class Loads:
    """Loads of all layers from the slots at `host`, an address, in `num_bytes` of pinned memory."""

    def __init__(self, page: int, layers: int, blocks: int, host: int, num_bytes: int) -> None:
        self._context = primary_context(0)
        driver = self._context.driver
        slot, chance = page * layers, np.random.default_rng(0)
        self.page, self.layers, self.blocks, self.total = page, layers, blocks, page * layers * blocks
        self.kv = torch.zeros(layers, blocks * 2, page, dtype=torch.uint8, device="cuda")
        places = np.zeros(blocks, PLACE)
        places["slot"] = host + chance.choice(num_bytes // slot, blocks, replace=False) * slot
        places["block"] = self.targets = chance.permutation(blocks * 2)[:blocks]
        parts = range(0, page, PIECE_BYTES)
        rows = [
            (self.kv[layer].data_ptr() + start, page, layer * page + start, min(PIECE_BYTES, page - start))
            for layer in range(layers)
            for start in parts
        ]
        pieces = np.array(rows, PIECE)
        self._tables = [torch.from_numpy(table.view(np.uint8)).cuda() for table in (pieces, places)]
        self._arguments = [
            Arguments(
                self._tables[0].data_ptr() + layer * len(parts) * PIECE.itemsize,
                self._tables[1].data_ptr(),
                len(parts),
                blocks,
            )
            for layer in range(layers)
        ]
        self._pointers = [pointers_to_fields(arguments) for arguments in self._arguments]
        with self._context.current():
            self._module = driver.load_module(machine_code(driver, driver.compute_capability(0)))
            self._function = driver.get_function(self._module, "fetch")
            self.streams = {urgent: driver.create_stream(urgent=urgent) for urgent in (False, True)}
        torch.cuda.synchronize()

    def layer(self, number: int, grid: tuple[int, int], *, urgent: bool = True) -> None:
        with self._context.current():
            self._context.driver.launch(
                self._function,
                (grid[0], 1),
                grid[1],
                self.streams[urgent],
                ctypes.addressof(self._pointers[number]),
            )

    def all(self, grid: tuple[int, int], *, urgent: bool = True) -> None:
        for number in range(self.layers):
            self.layer(number, grid, urgent=urgent)

    def seconds(self, grid: tuple[int, int], times: int = 3) -> float:
        return min(_timed(lambda: self.all(grid)) for _ in range(times))

    def stream(self, *, urgent: bool) -> Any:
        return _ExternalStream(int(self.streams[urgent]))


def _timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


class Report:
    def __init__(self, out: Path) -> None:
        self._path, self._rows = out / "layers.json", list[dict[str, Any]]()

    def add(self, **row: Any) -> None:
        self._rows.append(row)
        print(json.dumps(row), flush=True)
        self._path.write_text(json.dumps(self._rows, indent=1))


def measure_link() -> float:
    """Return the rate of one large copy, in GB/s."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True).fill_(1)
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    seconds = [_timed(lambda: device.copy_(host, non_blocking=True)) for _ in range(6)]
    return GIB / statistics.median(seconds[1:]) / 1e9


def measure_rates(loads: Loads, link: float, report: Report, grids: Sequence[tuple[int, int]], memory: str) -> None:
    for grid in grids:
        rate = loads.total / loads.seconds(grid) / 1e9
        names = {"page": loads.page, "layers": loads.layers, "memory": memory, "blocks": grid[0], "threads": grid[1]}
        report.add(kind="rate", **names, gb_s=round(rate, 1), of_link=round(rate / link, 3))


def measure_beside(loads: Loads, link: float, report: Report) -> None:
    """Multiply matrices of 4,096 x 4,096 (bf16), one pair after the other, for about 60 ms. Loads are measured before,
    beside and after that."""
    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    begin, end = (_Event(enable_timing=True) for _ in range(2))

    def products(number: int = 300) -> float:
        """Return the device's seconds for the products. Waits only for these."""
        begin.record()
        for _ in range(number):
            torch.matmul(left, left)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    for _ in range(3):
        products()
    for grid in BESIDE:
        for urgent in (True, False):
            alone, beside, rates = [], [], []
            for _ in range(3):
                torch.cuda.synchronize()
                alone.append(products())
                marks = [_Event(enable_timing=True) for _ in range(2)]
                passes = 1 + int(2.5 * alone[-1] / (loads.total / link / 1e9))
                stream = loads.stream(urgent=urgent)
                marks[0].record(stream)
                for _ in range(passes):
                    loads.all(grid, urgent=urgent)
                marks[1].record(stream)
                beside.append(products())
                under_way = not marks[1].query()
                torch.cuda.synchronize()
                rates.append(passes * loads.total / marks[0].elapsed_time(marks[1]) / 1e6)
            report.add(
                kind="beside",
                page=loads.page,
                blocks=grid[0],
                threads=grid[1],
                urgent=urgent,
                ratio=round(statistics.median(beside) / statistics.median(alone), 3),
                load_gb_s=round(statistics.median(rates), 1),
                loads_under_way_throughout=under_way,
            )


def measure_forward(loads: Loads, link: float, report: Report, grids: Sequence[tuple[int, int]]) -> None:
    """Measure forward passes whose products take about as long as the load."""
    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def products(number: int) -> None:
        for _ in range(number):
            torch.matmul(left, left)

    products(50)
    one = _timed(lambda: products(200)) / 200
    per = max(1, round(loads.total / 1e9 / link / loads.layers / one))
    compute = torch.cuda.current_stream()

    def alone() -> None:
        products(per * loads.layers)

    for grid in grids:
        for urgent in (True, False):
            stream = loads.stream(urgent=urgent)

            def overlapped(grid: tuple[int, int] = grid, urgent: bool = urgent, stream: Any = stream) -> None:
                events = []
                for number in range(loads.layers):
                    loads.layer(number, grid, urgent=urgent)
                    events.append(stream.record_event())
                for event in events:
                    compute.wait_event(event)
                    products(per)

            def serial(grid: tuple[int, int] = grid, urgent: bool = urgent, stream: Any = stream) -> None:
                loads.all(grid, urgent=urgent)
                compute.wait_event(stream.record_event())
                alone()

            times = {
                f"{work.__name__}_ms": round(1e3 * min(_timed(work) for _ in range(4)), 2)
                for work in (alone, serial, overlapped)
            }
            report.add(
                kind="forward",
                page=loads.page,
                layers=loads.layers,
                blocks=grid[0],
                threads=grid[1],
                urgent=urgent,
                load_ms=round(1e3 * loads.seconds(grid), 2),
                **times,
                ratio=round(times["overlapped_ms"] / times["serial_ms"], 3),
            )


@contextmanager
def memory(num_bytes: int, kind: str) -> Iterator[int]:
    """Yield the address of registered memory. "memfd" has pages of 4 KiB. "memfd, huge" has pages of 2 MiB if the
    machine has them. "private, huge" is the memory of an embedded pool."""
    libc = ctypes.CDLL(None, use_errno=True)
    if kind.startswith("memfd"):
        file = os.memfd_create("layers")
        os.ftruncate(file, num_bytes)
        mapped = mmap.mmap(file, num_bytes, mmap.MAP_SHARED)
        os.close(file)
    else:
        mapped = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    if kind.endswith("huge"):
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), mmap.MADV_HUGEPAGE)
    words = np.frombuffer(mapped, np.uint64)
    words[:: 512 if num_bytes > 2 * POOL else 1] = 0x0102030405060708
    context = primary_context(0)
    starts = range(address, address + num_bytes, REGISTERED)
    with context.current():
        for start in starts:
            context.driver.register_host(start, min(REGISTERED, address + num_bytes - start))
    try:
        yield address
    finally:
        torch.cuda.synchronize()
        with context.current():
            for start in starts:
                context.driver.unregister_host(start)
        del words
        with suppress(BufferError):
            mapped.close()


def check(loads: Loads, grid: tuple[int, int]) -> None:
    loads.kv.zero_()
    torch.cuda.synchronize()
    loads.all(grid)
    torch.cuda.synchronize()
    index = torch.from_numpy(loads.targets).cuda()
    if not bool((loads.kv[:, index].view(torch.int64) == 0x0102030405060708).all()):
        raise RuntimeError(f"wrong bytes with {grid}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m bench.gpu.layers", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), metavar="DIR")
    parser.add_argument("--memfd", type=float, default=0, metavar="GIB")
    parser.add_argument("--quick", action="store_true", help="two shapes and fewer grids")
    options = parser.parse_args(argv)
    report, stack = Report(options.out), ExitStack()
    link = measure_link()
    report.add(kind="link", gb_s=round(link, 1), device=torch.cuda.get_device_name(0))
    shapes = (SHAPES[0], SHAPES[2]) if options.quick else SHAPES
    with stack:
        host = stack.enter_context(memory(POOL, "private, huge"))
        for page, layers, blocks in shapes:
            loads = Loads(page, layers, blocks, host, POOL)
            check(loads, (8, 512))
            measure_rates(loads, link, report, BESIDE if options.quick else GRIDS, "private, huge")
            if page != 16 * KIB:
                measure_beside(loads, link, report)
            measure_forward(loads, link, report, ((8, 512), (16, 512)))
            del loads
    for kind in ("memfd", "memfd, huge") if options.memfd else ():
        num_bytes = int(options.memfd * GIB)
        with memory(num_bytes, kind) as host:
            for page, layers, blocks in (SHAPES[0], SHAPES[2]):
                measure_rates(Loads(page, layers, blocks, host, num_bytes), link, report, ((8, 512), (16, 512)), kind)
    return 0


if __name__ == "__main__":
    sys.exit(main())
