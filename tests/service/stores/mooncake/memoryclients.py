"""Clients of a Mooncake in the memory of this process, which do what the test says."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence

from kvstow.errors import TierUnavailableError
from kvstow_service.stores.mooncake.objects import (
    MAX_BATCH_OBJECTS,
    ClientHealth,
    GetStatus,
    MemoryRange,
    ObjectName,
    PutStatus,
    SlotObject,
)


class MemoryClients:
    """`status`: what becomes of an object instead of being moved. `error`: what each call raises. `gate`: calls wait
    for it. `on_move` is called with the number of bytes of each put and get. `calls`: kind and number of objects of
    each."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.status: Callable[[ObjectName], str | None] = lambda name: None
        self.error: Exception | None = None
        self.on_move: Callable[[int], object] = lambda num_bytes: None
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[str, int]] = []
        self.order: list[ObjectName] = []

    def open_transfers(self, witness: int) -> MemoryTransfers:
        return MemoryTransfers(self)

    def open_lookups(self) -> MemoryLookups:
        return MemoryLookups(self)

    def enter(self, kind: str, count: int) -> None:
        self.calls.append((kind, count))
        assert self.gate.wait(60), "the test has left the gate shut"
        if self.error is not None:
            raise self.error


class _Client:
    def __init__(self, clients: MemoryClients) -> None:
        self._clients, self._is_closed = clients, False

    def health(self) -> ClientHealth:
        return ClientHealth("closed", "it was closed") if self._is_closed else ClientHealth("on")

    def close(self) -> None:
        self._is_closed = True
        self._clients.gate.set()

    def _enter(self, kind: str, count: int) -> None:
        self._clients.enter(kind, count)
        if self._is_closed:
            raise TierUnavailableError("the client was closed")


class MemoryTransfers(_Client):
    def __init__(self, clients: MemoryClients) -> None:
        super().__init__(clients)
        self.memory: dict[int, mmap.mmap] = {}

    def add_memory(self, memory: MemoryRange) -> None:
        self.memory[memory.range_id] = mmap.mmap(memory.fd, memory.num_bytes)

    def remove_memory(self, range_id: int) -> None:
        self.memory.pop(range_id).close()

    def _move(self, kind: str, objects: Sequence[SlotObject]) -> None:
        self._enter(kind, len(objects))
        self._clients.on_move(sum(one.num_bytes for one in objects))

    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        self._move("put", objects)
        assert len(objects) <= MAX_BATCH_OBJECTS
        found: list[PutStatus] = []
        for one in objects:
            status = self._clients.status(one.name)
            if status is None:
                where, start = self.memory[one.range_id], one.offset
                self._clients.objects.setdefault(str(one.name), where[start : start + one.num_bytes])
                self._clients.order.append(one.name)
            found.append("stored" if status is None else "full" if status == "full" else "failed")
        return found

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        self._move("get", objects)
        assert len(objects) <= MAX_BATCH_OBJECTS
        found: list[GetStatus] = []
        for one in objects:
            status, data = self._clients.status(one.name), self._clients.objects.get(str(one.name))
            if status is None and data is not None:
                where, start = self.memory[one.range_id], one.offset
                where[start : start + len(data)] = data
                found.append("found")
            else:
                found.append("corrupt" if status == "corrupt" else "failed" if status == "failed" else "missing")
        return found


class MemoryLookups(_Client):
    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        self._enter("exists", len(names))
        return [str(name) in self._clients.objects for name in names]
