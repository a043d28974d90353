"""The tier's benchmark for one size of slots, in its own network namespace. KVStow's client and a bare loop over the
library fill and read a Mooncake store on this machine. argv: bytes of a slot, bytes moved for a figure, rounds.

It answers with a line of JSON: for each subject and direction, the bytes per second of each round.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.service.stores.mooncake.cluster import Cluster

from kvstow.keys import make_key
from kvstow.memfd import create_memfd
from kvstow_service.stores.mooncake.mooncakestore import MooncakeStore
from kvstow_service.stores.mooncake.objects import (
    MAX_BATCH_BYTES,
    MAX_BATCH_OBJECTS,
    MemoryRange,
    ObjectName,
    SlotObject,
)

_SEGMENT_BYTES = 1 << 30
_TIMEOUT = 60.0

Rates = dict[str, list[float]]


class Ours:
    """KVStow's client for one rank."""

    def __init__(self, cluster: Cluster, fd: int, slot_bytes: int, num_slots: int) -> None:
        store = MooncakeStore(cluster.location)
        reading, writing = os.pipe()
        os.close(reading)
        self._transfers = store.open_transfers(writing)
        self._transfers.add_memory(MemoryRange(0, slot_bytes * num_slots, fd))
        self._slot_bytes = slot_bytes

    def put(self, numbers: range, slots: range) -> bool:
        return set(self._transfers.put(self._objects(numbers, slots), _TIMEOUT)) == {"stored"}

    def get(self, numbers: range, slots: range) -> bool:
        return set(self._transfers.get(self._objects(numbers, slots), _TIMEOUT)) == {"found"}

    def close(self) -> None:
        self._transfers.close()

    def _objects(self, numbers: range, slots: range) -> list[SlotObject]:
        return [
            SlotObject(
                ObjectName("bench", make_key(0, number.to_bytes(32, "big")), 0, 1),
                0,
                slot * self._slot_bytes,
                self._slot_bytes,
            )
            for number, slot in zip(numbers, slots, strict=True)
        ]


class Bare:
    """A loop over the library, in its own process."""

    def __init__(self, cluster: Cluster, fd: int, slot_bytes: int, num_slots: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BARE, cluster.location.master, str(fd), str(slot_bytes), str(num_slots)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[fd],
            text=True,
        )

    def ask(self, call: str, first: int, batch: int, count: int) -> float:
        """Make `count` batches, and return their bytes per second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([call, first, batch, count]), file=self._process.stdin, flush=True)
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


_BARE = """
import ctypes, json, mmap, sys, time
from mooncake.store import MooncakeDistributedStore
master, fd, slot_bytes, num_slots = sys.argv[1], *map(int, sys.argv[2:])
memory = mmap.mmap(fd, slot_bytes * num_slots)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master) == 0
assert store.register_buffer(address, slot_bytes * num_slots) == 0
for line in sys.stdin:
    call, first, batch, count = json.loads(line)
    if call == "clear":
        store.remove_by_regex("^(bare|kvs1:bench:).*", True)
        print(0, flush=True)
        continue
    move = store.batch_put_from if call == "put" else store.batch_get_into
    expected = 0 if call == "put" else slot_bytes
    source = 0 if call == "put" else batch
    began = time.perf_counter()
    for turn in range(count):
        at = first + turn * batch
        names = [f"bare{number}" for number in range(at, at + batch)]
        addresses = [address + (source + slot) * slot_bytes for slot in range(batch)]
        assert set(move(names, addresses, [slot_bytes] * batch)) == {expected}
    print(batch * count * slot_bytes / (time.perf_counter() - began), flush=True)
"""


def measure(slot_bytes: int, moved_bytes: int, rounds: int) -> dict[str, Rates]:
    batch = max(1, min(MAX_BATCH_OBJECTS, MAX_BATCH_BYTES // slot_bytes))
    count, num_slots = max(1, moved_bytes // (batch * slot_bytes)), 2 * batch
    found: dict[str, Rates] = {"ours": {"put": [], "get": []}, "bare": {"put": [], "get": []}}
    with _cluster() as cluster, _memory(slot_bytes * num_slots) as fd:
        ours, bare = Ours(cluster, fd, slot_bytes, num_slots), Bare(cluster, fd, slot_bytes, num_slots)
        try:
            _touch_segment(bare, slot_bytes, batch)
            for turn in range(rounds):
                first = turn * batch * count
                for subject, call in [("bare", "put"), ("ours", "put"), ("bare", "get"), ("ours", "get")]:
                    if subject == "bare":
                        rate = bare.ask(call, first, batch, count)
                    else:
                        rate = _rate(getattr(ours, call), call, first, batch, count, slot_bytes)
                    found[subject][call].append(rate)
                bare.ask("clear", 0, 0, 0)
        finally:
            ours.close()
            bare.close()
    return found


def _rate(
    move: Callable[[range, range], bool], call: str, first: int, batch: int, count: int, slot_bytes: int
) -> float:
    slots = range(batch) if call == "put" else range(batch, 2 * batch)
    began = time.perf_counter()
    for turn in range(count):
        at = first + turn * batch
        if not move(range(at, at + batch), slots):
            raise RuntimeError(f"a {call} of {batch} objects failed")
    return batch * count * slot_bytes / (time.perf_counter() - began)


def _touch_segment(bare: Bare, slot_bytes: int, batch: int) -> None:
    """Write to all of the memory once, because puts into untouched memory take up to ten times as long."""
    bare.ask("put", 0, batch, int(0.8 * _SEGMENT_BYTES) // (batch * slot_bytes))
    bare.ask("clear", 0, 0, 0)


@contextmanager
def _cluster() -> Iterator[Cluster]:
    with TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder) / "log", _SEGMENT_BYTES, watermark=0.95)
        try:
            yield cluster
        finally:
            cluster.close()


@contextmanager
def _memory(num_bytes: int) -> Iterator[int]:
    """Yield a memfd with contents."""
    fd = create_memfd("kvstow-bench", num_bytes)
    with mmap.mmap(fd, num_bytes) as memory:
        memory[:] = os.urandom(1 << 16) * (num_bytes >> 16)
    try:
        yield fd
    finally:
        os.close(fd)


if __name__ == "__main__":
    print(json.dumps(measure(*(int(text) for text in sys.argv[1:]))), flush=True)
