"""What populating a pool's memory costs the other threads of its process, which wait for the address space."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from bench.machine import wait_until_quiet
from bench.report import Table
from kvstow.memory.limits import MemoryLimits
from kvstow.memory.region import HostRegion

GIB = 1 << 30

_CHUNK = 64 << 20  # the largest chunk for which the pool asks
_MAPPED = 1 << 20
_PAUSE = 0.0005
_PATIENCE_SECONDS = 8.0
_WAYS = {"touched (memory is plenty)": True, "populated by the kernel (a limit is near)": False}


@dataclass(frozen=True, slots=True)
class Beside:
    """One run over the whole memory: its rate, and the times of mmap and munmap of 1 MiB meanwhile, in ascending
    order."""

    gib_per_second: float
    milliseconds: list[float]

    def percentile(self, share: float) -> float:
        return self.milliseconds[min(len(self.milliseconds) - 1, int(share * len(self.milliseconds)))]


def run(repeats: int, say: Callable[[str], None], num_bytes: int = 2 * GIB) -> list[Table]:
    """Measure the ways by turns. The figures of a way are the medians over its repeats."""
    shortage = MemoryLimits().shortage(num_bytes + GIB)
    if shortage is not None:
        say(f"populate, not run: {shortage.message}")
        return []
    found: dict[str, list[Beside]] = {way: [] for way in _WAYS}
    _measure(num_bytes, plenty=True)  # not counted, because a virtual machine may get the memory only now
    for _ in range(repeats):
        for way, plenty in _WAYS.items():
            wait_until_quiet(_PATIENCE_SECONDS)
            found[way].append(_measure(num_bytes, plenty=plenty))
            say(f"populate, {way}")
    head = ["2 GiB", "GiB/s", "an mmap meanwhile: p50", "p99", "longest"]
    return [Table("Populating, and an mmap of another thread beside it", head, [_row(*item) for item in found.items()])]


def _row(way: str, runs: list[Beside]) -> list[str]:
    waits = (median(one.percentile(share) for one in runs) for share in (0.5, 0.99, 1.0))
    return [way, f"{median(one.gib_per_second for one in runs):.1f}", *(f"{wait:.2f} ms" for wait in waits)]


def _measure(num_bytes: int, *, plenty: bool) -> Beside:
    region, waits = HostRegion(num_bytes), list[float]()
    seconds = 0.0

    def commit() -> None:
        nonlocal seconds
        began = time.perf_counter()
        for offset in range(0, num_bytes, _CHUNK):
            region.commit(offset, _CHUNK, plenty=plenty)
        seconds = time.perf_counter() - began

    thread = threading.Thread(target=commit)
    thread.start()
    while thread.is_alive():
        began = time.perf_counter()
        mmap.mmap(-1, _MAPPED).close()
        waits.append(1e3 * (time.perf_counter() - began))
        time.sleep(_PAUSE)
    thread.join()
    region.close()
    return Beside(num_bytes / GIB / seconds, sorted(waits))
