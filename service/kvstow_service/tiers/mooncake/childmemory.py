"""The memory of a rank in a child process: mapped, and registered with Mooncake."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

from kvstow_service.tiers.mooncake.childmessages import SlotPart

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore


class RegistrationError(Exception):
    """Mooncake did not register the memory."""


class Registered:
    """A piece of memory that Mooncake may read and write. Not locked."""

    def __init__(self, store: MooncakeDistributedStore, fd: int, num_bytes: int, offset: int = 0) -> None:
        """Maps `num_bytes` of `fd` (-1: of no file) from `offset` on, and registers them. Raises `RegistrationError` or
        `OSError`."""
        before = offset % mmap.ALLOCATIONGRANULARITY
        self._store, self.num_bytes = store, num_bytes
        self._map = mmap.mmap(fd, before + num_bytes, offset=offset - before)
        self._bytes = (ctypes.c_char * num_bytes).from_buffer(self._map, before)
        self.address = ctypes.addressof(self._bytes)
        self.view = memoryview(self._map)[before:]
        code = store.register_buffer(self.address, num_bytes)
        if code != 0:
            self._unmap()
            raise RegistrationError(f"Mooncake registered no memory of {num_bytes} bytes: code {code}")

    def close(self) -> None:
        """Unregister and unmap it. Nothing may use it any more."""
        self._store.unregister_buffer(self.address)
        self._unmap()

    def _unmap(self) -> None:
        self.view.release()
        del self._bytes
        self._map.close()


class ChildMemory:
    """All memory of one rank. Ranges come and go on one thread while others use the rest."""

    def __init__(self, store: MooncakeDistributedStore) -> None:
        self._store = store
        self._ranges: dict[int, Registered] = {}

    def add(self, range_id: int, fd: int, num_bytes: int, offset: int) -> None:
        """Raises `RegistrationError` or `OSError`. The caller still owns `fd`."""
        self._ranges[range_id] = Registered(self._store, fd, num_bytes, offset)

    def remove(self, range_id: int) -> None:
        self._ranges.pop(range_id).close()

    def address(self, part: SlotPart) -> int:
        """Of a slot. Raises `LookupError` unless all of it lies in one registered range: with TCP, Mooncake reads and
        writes any address that it is given."""
        found = self._ranges.get(part.range_id)
        if found is None:
            raise LookupError(f"memory range {part.range_id} is not registered")
        if part.offset < 0 or part.num_bytes < 1 or part.offset + part.num_bytes > found.num_bytes:
            raise LookupError(f"{part.num_bytes} bytes at {part.offset} do not lie in a range of {found.num_bytes}")
        return found.address + part.offset

    def view(self, part: SlotPart) -> memoryview:
        return self._ranges[part.range_id].view[part.offset : part.offset + part.num_bytes]
