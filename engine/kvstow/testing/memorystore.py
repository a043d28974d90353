"""A tier's store in the memory of this process: for tests and benchmarks."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from kvstow.errors import TierUnavailableError
from kvstow.tier.store import (
    ClientHealth,
    ClientStats,
    GetStatus,
    MemoryRange,
    ObjectName,
    PutStatus,
    SlotObject,
    check_batch,
)


class MemoryStore:
    """Objects of one process, least recently used ones first to go. Thread-safe."""

    name = "memory"

    def __init__(self, capacity_bytes: int | None = None) -> None:
        """`capacity_bytes`: None for no limit. What is larger than the whole store is never stored."""
        self._capacity = capacity_bytes
        self._lock = Lock()
        self._objects: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0

    def open_transfers(self, witness: int | None = None) -> MemoryTransfers:
        return MemoryTransfers(self)

    def open_lookups(self) -> MemoryLookups:
        return MemoryLookups(self)

    @property
    def num_objects(self) -> int:
        with self._lock:
            return len(self._objects)

    def put(self, name: str, data: bytes) -> PutStatus:
        """The youngest object from now on; it keeps its bytes if it is there already."""
        with self._lock:
            if name not in self._objects:
                if self._capacity is not None and len(data) > self._capacity:
                    return "full"
                self._objects[name] = data
                self._num_bytes += len(data)
            self._objects.move_to_end(name)
            while self._capacity is not None and self._num_bytes > self._capacity:
                _, oldest = self._objects.popitem(last=False)
                self._num_bytes -= len(oldest)
        return "stored"

    def get(self, name: str) -> bytes | None:
        """The object's bytes; it is the youngest from now on."""
        with self._lock:
            data = self._objects.get(name)
            if data is not None:
                self._objects.move_to_end(name)
            return data

    def has(self, names: Sequence[str]) -> list[bool]:
        with self._lock:
            return [name in self._objects for name in names]


class _MemoryClient:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._closed = False

    def health(self) -> ClientHealth:
        return ClientHealth("closed", "it was closed") if self._closed else ClientHealth("connected")

    def stats(self) -> ClientStats:
        return ClientStats()

    def close(self) -> None:
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise TierUnavailableError("the client was closed")


class MemoryTransfers(_MemoryClient):
    """The `TransferClient` of a `MemoryStore`. It copies during the call, so no timeout is ever exceeded."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self._ranges: tuple[MemoryRange, ...] = ()

    def add_memory(self, memory: MemoryRange) -> None:
        self._ranges = (*self._ranges, memory)

    def remove_memory(self, memory: MemoryRange) -> None:
        self._ranges = tuple(one for one in self._ranges if one.address != memory.address)

    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        self._require_open()
        check_batch(objects, self._ranges)
        return [self._store.put(str(one.name), ctypes.string_at(one.address, one.num_bytes)) for one in objects]

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        self._require_open()
        check_batch(objects, self._ranges)
        return [self._get(one) for one in objects]

    def _get(self, one: SlotObject) -> GetStatus:
        data = self._store.get(str(one.name))
        if data is None:
            return "missing"
        if len(data) != one.num_bytes:
            return "corrupt"
        ctypes.memmove(one.address, data, len(data))
        return "found"


class MemoryLookups(_MemoryClient):
    """The `LookupClient` of a `MemoryStore`."""

    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        self._require_open()
        return self._store.has([str(name) for name in names])
