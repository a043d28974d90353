"""Memory that Mooncake may read and write, and room for the objects of one batch."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Protocol

from kvstow_service.stores.mooncake.objectheader import HEADER_BYTES, find_mismatch, pack_header
from kvstow_service.stores.mooncake.objects import SlotObject

STAGED_BYTES = 256 << 10
"""Slots up to this size are copied to or from staging memory, where the header follows the slot, so that an object is
one piece. The copy takes 10 us for 256 KiB. With TCP, Mooncake makes a request for each piece of an object, and one for
a header alone takes 30 us."""


class MemoryRegistry(Protocol):
    """Mooncake's store, whose library only the child process may import. A call returns 0 unless it fails."""

    def register_buffer(self, address: int, num_bytes: int, /) -> int: ...

    def unregister_buffer(self, address: int, /) -> int: ...


class RegistrationError(Exception):
    """Mooncake did not register the memory."""


class Registered:
    """A piece of memory that Mooncake may read and write. Not locked."""

    def __init__(self, store: MemoryRegistry, fd: int, num_bytes: int) -> None:
        """Map `num_bytes` of `fd`, or of no file if `fd` is -1, and register them. Raises `RegistrationError` or
        `OSError`."""
        self._store, self.num_bytes = store, num_bytes
        self._map = mmap.mmap(fd, num_bytes)
        self._bytes = (ctypes.c_char * num_bytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._bytes)
        self.view = memoryview(self._map)
        code = store.register_buffer(self.address, num_bytes)
        if code != 0:
            self._unmap()
            raise RegistrationError(f"Mooncake cannot register {num_bytes} bytes of memory: code {code}")

    def close(self) -> None:
        self._store.unregister_buffer(self.address)
        self._unmap()

    def _unmap(self) -> None:
        self.view.release()
        del self._bytes
        self._map.close()


class ChildMemory:
    """All memory of a child process. One thread adds and removes ranges while others use the other ranges."""

    def __init__(self, store: MemoryRegistry) -> None:
        self._store = store
        self._ranges: dict[int, Registered] = {}

    def add(self, range_id: int, fd: int, num_bytes: int) -> None:
        """Map and register a range. The caller still owns `fd`. Raises `RegistrationError` or `OSError`."""
        self._ranges[range_id] = Registered(self._store, fd, num_bytes)

    def remove(self, range_id: int) -> None:
        self._ranges.pop(range_id).close()

    def address(self, part: SlotObject) -> int:
        """Return the address of a slot. Raises `LookupError` unless the whole slot lies in one registered range,
        because with TCP, Mooncake reads and writes any address."""
        found = self._ranges.get(part.range_id)
        if found is None:
            raise LookupError(f"memory range {part.range_id} is not registered")
        if part.offset < 0 or part.num_bytes < 1 or part.offset + part.num_bytes > found.num_bytes:
            raise LookupError(f"{part.num_bytes} bytes at {part.offset} do not lie in a range of {found.num_bytes}")
        return found.address + part.offset

    def view(self, part: SlotObject) -> memoryview:
        return self._ranges[part.range_id].view[part.offset : part.offset + part.num_bytes]


Pieces = tuple[list[list[int]], list[list[int]]]
"""For each object, the addresses and sizes of its pieces."""


class ObjectBuffers:
    """Room for the headers of one batch, and for its small slots. Not locked. One thread uses it."""

    def __init__(self, store: MemoryRegistry, memory: ChildMemory, num_objects: int) -> None:
        """Reserve the room. It takes no memory until a batch uses it. Raises `RegistrationError`."""
        self._memory, self._num_objects = memory, num_objects
        self._headers = Registered(store, -1, num_objects * HEADER_BYTES)
        self._staging = Registered(store, -1, num_objects * (STAGED_BYTES + HEADER_BYTES))

    def fill(self, objects: Sequence[SlotObject]) -> Pieces:
        """Make the objects of a batch from their slots, and return their pieces. Raises `LookupError`, before it
        touches a slot, for memory that is not registered."""
        pieces = self.place(objects)
        for index, part in enumerate(objects):
            slot = self._memory.view(part)
            header = pack_header(part.name.fingerprint, str(part.name), slot)
            if part.num_bytes <= STAGED_BYTES:
                start = _start(index)
                self._staging.view[start : start + part.num_bytes] = slot
                self._staging.view[start + part.num_bytes : start + part.num_bytes + HEADER_BYTES] = header
            else:
                self._headers.view[index * HEADER_BYTES : (index + 1) * HEADER_BYTES] = header
        return pieces

    def place(self, objects: Sequence[SlotObject]) -> Pieces:
        """Return the pieces in which the objects of a batch will be. Raises `LookupError` for memory that is not
        registered, also if there is no room for that many objects."""
        if len(objects) > self._num_objects:
            raise LookupError(f"{len(objects)} objects, and room for {self._num_objects}")
        slots = [self._memory.address(part) for part in objects]
        addresses, sizes = list[list[int]](), list[list[int]]()
        for index, (part, slot) in enumerate(zip(objects, slots, strict=True)):
            if part.num_bytes <= STAGED_BYTES:
                addresses.append([self._staging.address + _start(index)])
                sizes.append([part.num_bytes + HEADER_BYTES])
            else:
                addresses.append([slot, self._headers.address + index * HEADER_BYTES])
                sizes.append([part.num_bytes, HEADER_BYTES])
        return addresses, sizes

    def take(self, index: int, part: SlotObject) -> str | None:
        """Verify an object of a batch that was placed, and copy it to its slot if it is not there already. Returns what
        is wrong with the object, or None."""
        slot = self._memory.view(part)
        if part.num_bytes > STAGED_BYTES:
            header = bytes(self._headers.view[index * HEADER_BYTES : (index + 1) * HEADER_BYTES])
            return find_mismatch(header, part.name.fingerprint, str(part.name), slot)
        start, end = _start(index), _start(index) + part.num_bytes
        staged = self._staging.view[start:end]
        header = bytes(self._staging.view[end : end + HEADER_BYTES])
        mismatch = find_mismatch(header, part.name.fingerprint, str(part.name), staged)
        if mismatch is None:
            slot[:] = staged
        return mismatch


def _start(index: int) -> int:
    return index * (STAGED_BYTES + HEADER_BYTES)
