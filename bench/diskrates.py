"""How fast the store on disks reads and writes, compared with fio on the same file.

Needs fio and a folder on ext4 or XFS. In each round, fio and the store read for some seconds, alone and beside writes.
In every other round, the store is first. fio has 16 jobs that make plain calls of 2 MiB (psync). Its writes go to a
file of its own, because they would damage the store's blocks. The store has one path, with its process and its default
number of threads, and verifies what it reads. Its file is full, because no disk has to read places that were never
written.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.report import Table, verdict
from kvstow.keys import make_key
from kvstow.memfd import create_memfd
from kvstow.tier.blockstore import BlockTransfer, Piece, StoredExtent, StoredLayout
from kvstow_service.stores.disk.diskstore import DiskStore
from kvstow_service.stores.disk.startcheck import CheckedPath

BLOCK = 2 << 20
_BLOCKS = 2048
"""How many blocks are read. They take 4 GiB on the disk, whose file is three times as large."""
_AT_ONCE = 16
"""How many blocks a transfer has."""
_TRANSFERS = 4
"""How many reads are under way at the same time. Writes have half as many."""
_PATIENCE = 120.0
_ALONE, _BESIDE = 0.9, 0.8
"""The bars for reads, as shares of fio's rate: alone and beside writes."""
_SECONDS_A_GB = 0.3
"""The bar for the CPU time of both processes."""


class Rate(NamedTuple):
    """Bytes a second that were read and written, and CPU seconds for each GB of both."""

    read: float
    written: float = 0.0
    cpu: float = 0.0


class _Pool:
    """A pool of one rank whose slots are read and written without an engine."""

    def __init__(self, store: DiskStore) -> None:
        self._changed = threading.Condition()
        self._left: dict[int, int] = {}
        """How many blocks of each transfer have not come back."""
        self._numbers = count(1)
        self._fingerprint = f"{os.getpid():032x}"
        self._pool = store.join(StoredLayout("pool", (BLOCK,), "rates", str(os.getuid())), self._on_end)
        self.num_slots = _AT_ONCE * (_TRANSFERS + _TRANSFERS // 2)
        size = self.num_slots * BLOCK
        fd = create_memfd("kvstow-disk-rates", size)
        os.pwrite(fd, random.Random(1).randbytes(size), 0)
        added = threading.Event()
        self._pool.add_extent(0, StoredExtent(1, 0, self.num_slots, BLOCK, size), fd, lambda error: added.set())
        added.wait(_PATIENCE)

    def _on_end(self, pieces: Sequence[Piece]) -> None:
        with self._changed:
            for piece in pieces:
                if piece.bad:
                    raise RuntimeError(f"{len(piece.bad)} blocks were not moved")
                self._left[piece.op_id] -= len(piece.good)
            self._changed.notify_all()

    def move(self, transfer: int, direction: str, blocks: Sequence[int]) -> None:
        """Read or write these blocks in the slots of this transfer. Reads count as uses, so that no write takes the
        places of these blocks."""
        keys = [make_key(0, block.to_bytes(32, "big")) for block in blocks]
        self._pool.offer(self._fingerprint, keys, is_use=True)
        slots = range(transfer * _AT_ONCE, transfer * _AT_ONCE + len(keys))
        with self._changed:
            number = next(self._numbers)
            self._left[number] = len(keys)
        (self._pool.read if direction == "read" else self._pool.write)(
            BlockTransfer(number, self._fingerprint, keys, slots)
        )
        with self._changed:
            if not self._changed.wait_for(lambda: not self._left[number], _PATIENCE):
                raise TimeoutError(f"a {direction} of {len(keys)} blocks did not end within {_PATIENCE:g} s")


@contextmanager
def _store(folder: Path) -> Iterator[DiskStore]:
    reading, writing = os.pipe()
    store = DiskStore([CheckedPath(folder)], 3 * _BLOCKS * BLOCK, None)
    store.start(writing)
    try:
        end = time.monotonic() + _PATIENCE
        while not all(part.state == "on" for part in store.parts()):
            if time.monotonic() > end:
                raise TimeoutError(f"the disk is not on: {store.parts()}")
            time.sleep(0.05)
        yield store
    finally:
        store.close()
        os.close(writing)
        os.close(reading)


class _Rates:
    """A store that was filled with blocks, of which `measure` reads the newest third."""

    def __init__(self, store: DiskStore) -> None:
        self._store, self._pool = store, _Pool(store)
        self._next = 0
        for _ in range(3 * _BLOCKS // _AT_ONCE):
            self._pool.move(0, "write", self._new())

    def _new(self) -> range:
        """Return the next blocks to write. Once the disk is full, they take the places of blocks that are not read."""
        self._next += _AT_ONCE
        return range(self._next - _AT_ONCE, self._next)

    def measure(self, seconds: float, *, writes: bool) -> Rate:
        moved, newest = {"read": 0, "write": 0}, range(2 * _BLOCKS, 3 * _BLOCKS)
        lock, choose = threading.Lock(), random.Random(2)
        end = time.monotonic() + seconds

        def work(transfer: int) -> None:
            direction = "read" if transfer < _TRANSFERS else "write"
            while time.monotonic() < end:
                with lock:
                    blocks = choose.sample(newest, _AT_ONCE) if direction == "read" else self._new()
                self._pool.move(transfer, direction, blocks)
                with lock:
                    moved[direction] += len(blocks)

        threads = [
            threading.Thread(target=work, args=(number,))
            for number in range(_TRANSFERS + (_TRANSFERS // 2 if writes else 0))
        ]
        began, cpu = time.monotonic(), self._cpu_seconds()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took, gigabytes = time.monotonic() - began, sum(moved.values()) * BLOCK / 1e9
        read, written = (blocks * BLOCK / took for blocks in moved.values())
        return Rate(read, written, (self._cpu_seconds() - cpu) / gigabytes)

    def _cpu_seconds(self) -> float:
        """Return the CPU time of this process and of those of the store."""
        ticks = 0
        for pid in self._store.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _fio(data: Path, seconds: float, *, writes: bool) -> Rate:
    common = [f"--size={_BLOCKS * BLOCK}", "--bs=2m", "--direct=1", "--ioengine=psync", "--thread", "--time_based"]
    common += [f"--runtime={seconds:g}", "--group_reporting", "--output-format=json"]
    jobs = ["--name=read", f"--filename={data}", "--rw=randread", "--numjobs=16"]
    if writes:
        jobs += ["--name=write", f"--filename={data.with_name('fio')}", "--rw=randwrite", "--numjobs=4"]
    found = subprocess.run(["fio", *common, *jobs], capture_output=True, text=True, check=True)
    of_jobs = json.loads(found.stdout)["jobs"]
    return Rate(sum(job["read"]["bw_bytes"] for job in of_jobs), sum(job["write"]["bw_bytes"] for job in of_jobs))


def run(folder: Path | None, rounds: int, seconds: float, say: Callable[[str], None]) -> list[Table]:
    """`folder`: on the disk, by default a temporary one in the working directory. Needs 20 GiB there."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvstow-rates-", dir=folder or Path.cwd()) as made:
        path = Path(made)
        with _store(path) as store:
            rates = _Rates(store)
            data = next(path.rglob("data"))
            for writes, bar in ((False, _ALONE), (True, _BESIDE)):
                pairs = []
                for number in range(rounds):
                    if number % 2:  # some disks allow a short burst, which favours the first reader
                        ours, theirs = rates.measure(seconds, writes=writes), _fio(data, seconds, writes=writes)
                    else:
                        theirs, ours = _fio(data, seconds, writes=writes), rates.measure(seconds, writes=writes)
                    pairs.append((ours, theirs))
                    say(f"disk rates, round {number + 1}, writes {writes}: {ours}, fio {theirs}")
                rows.append(_row("reads beside writes" if writes else "reads", pairs, bar))
    head = ["", "KVStow, GB/s", "fio, GB/s", "of fio", "bar", "CPU seconds a GB", "bar"]
    return [Table("Blocks of 2 MiB, medians of rounds", head, rows)]


def _row(title: str, pairs: Sequence[tuple[Rate, Rate]], bar: float) -> list[str]:
    share = median(ours.read / theirs.read for ours, theirs in pairs)
    cpu = median(ours.cpu for ours, _ in pairs)
    return [
        title,
        *(f"{median(one.read for one in each) / 1e9:.2f}" for each in zip(*pairs, strict=True)),
        f"{share:.2f}",
        f"{bar:g}, {verdict(share >= bar)}",
        f"{cpu:.2f}",
        f"{_SECONDS_A_GB:g}, {verdict(cpu <= _SECONDS_A_GB)}",
    ]
