"""An extent of the node service in one rank's pool: its mapping, its slots, and the chunks that are registered."""

from __future__ import annotations

import ctypes
import errno
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvstow.bytesize import format_size
from kvstow.errors import PinError
from kvstow.memory.chunks import Chunk, ChunkGrid
from kvstow.memory.pinning import PacedRegistrar
from kvstow.memory.region import HUGE_PAGE_BYTES, PAGE_BYTES, HostRegion, bytes_by_node, round_up

_PIECE_BYTES = 8 << 20  # per call that makes pages present: meanwhile an mmap of any thread waits

_PROT_NONE, _PROT_READ_WRITE = 0, 1 | 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MADV_DONTFORK, _MADV_POPULATE_READ = 10, 22

_libc = ctypes.CDLL(None, use_errno=True)
_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.madvise.argtypes = (_address, _size, _int)

# Calls of some microseconds keep the interpreter lock: beside a host that computes in Python, each that let go of it
# would wait 5 ms.
_quick = ctypes.PyDLL(None, use_errno=True)
_quick.mmap.restype, _quick.mmap.argtypes = _address, (_address, _size, _int, _int, _int, ctypes.c_long)
_quick.madvise.argtypes = _libc.madvise.argtypes


class ExtentMapping:
    """Address space for an extent, aligned to a huge page. `map` and `unmap` say which of the extent's bytes are in it;
    a child process inherits none.

    Not locked: one thread at a time. The owner calls `close`, which is idempotent.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Takes over `fd`. Raises `PinError` if there is no address space; then the caller still owns it."""
        self._region = HostRegion(num_bytes)
        self.fd = fd
        self.num_bytes = num_bytes
        self.address = self._region.address

    def map(self, start: int, end: int) -> None:
        """Map these bytes, which are whole pages of 2 MiB and have memory already, and make their pages present: so
        registering them is twice as fast. Raises `PinError`, with nothing of the range mapped.

        Bytes without memory would get some, at this process's expense."""
        address, size = self.address + start, end - start
        flags = _MAP_SHARED | _MAP_FIXED
        if _quick.mmap(address, size, _PROT_READ_WRITE, flags, self.fd, start) != address:
            raise PinError("out_of_memory", f"mapping {format_size(size)} of the node's memory failed: {_error_text()}")
        try:
            _quick.madvise(address, size, _MADV_DONTFORK)
            for offset in range(0, size, _PIECE_BYTES):
                _make_present(address + offset, min(_PIECE_BYTES, size - offset))
        except BaseException:
            self.unmap(start, end)
            raise

    def unmap(self, start: int, end: int) -> None:
        """Replace the range with reserved address space."""
        address, size = self.address + start, end - start
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        if _quick.mmap(address, size, _PROT_NONE, flags, -1, 0) != address:
            raise PinError("out_of_memory", f"unmapping {format_size(size)} failed: {_error_text()}")
        _quick.madvise(address, size, _MADV_DONTFORK)

    def close(self) -> None:
        """Unmap everything, and close the descriptor."""
        self._region.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _make_present(address: int, num_bytes: int) -> None:
    if _libc.madvise(address, num_bytes, _MADV_POPULATE_READ) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise PinError("out_of_memory", f"mapping {format_size(num_bytes)} failed: {_error_text()}")
    pages = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))  # a kernel before 5.14
    pages[::PAGE_BYTES].max()


def _error_text() -> str:
    code = ctypes.get_errno()
    return f"{errno.errorcode.get(code, code)} ({os.strerror(code)})"


_NODE_STEP = 16 << 20  # bytes between two samples of the NUMA node


class ExtentPlace(NamedTuple):
    """Which memory an extent is, and which slots it has."""

    device: int
    inode: int
    num_bytes: int
    first_slot: int
    num_slots: int


@dataclass(eq=False, slots=True)
class MappedExtent:
    """Not locked: changed under the lock of its pool.

    `is_granted`: in the current session. A revoked one is on its way out; `is_awaited`: the service waits for it.
    """

    extent_id: int
    place: ExtentPlace
    grid: ChunkGrid
    mapping: ExtentMapping
    populated_bytes: int = 0
    is_granted: bool = True
    is_revoked: bool = False
    is_awaited: bool = False

    @property
    def may_be_used(self) -> bool:
        return self.is_granted and not self.is_revoked

    @property
    def first_slot(self) -> int:
        return self.place.first_slot

    @property
    def end_slot(self) -> int:
        return self.place.first_slot + self.place.num_slots

    def raise_populated(self, num_bytes: int) -> None:
        """So many bytes have memory. A smaller number than before changes nothing."""
        self.populated_bytes = max(self.populated_bytes, num_bytes - num_bytes % HUGE_PAGE_BYTES)

    def next_chunk(self, slot: int, num_bytes: int) -> ExtentChunk | None:
        """The chunk that begins with this slot, of `num_bytes` at most or the smallest possible; None if it has no
        memory yet."""
        done, shown = slot - self.first_slot, self._shown_slots()
        if done >= shown:
            return None
        chunk = self.grid.next_chunk(done, shown, num_bytes)
        first, end = self.first_slot + chunk.first_slot, self.first_slot + chunk.end_slot
        return ExtentChunk(first, end, chunk.offset, chunk.num_bytes, self)

    def _shown_slots(self) -> int:
        """Of its slots, those that lie below the watermark and end where a chunk may end."""
        slots = min(self.place.num_slots, self.populated_bytes // self.grid.slot_stride)
        return slots if slots == self.place.num_slots else slots - slots % self.grid.unit_slots


@dataclass(frozen=True, slots=True)
class ExtentChunk(Chunk):
    """`offset` counts from the beginning of the extent."""

    extent: MappedExtent

    @property
    def address(self) -> int:
        return self.extent.mapping.address + self.offset

    def pages(self) -> tuple[int, int]:
        """Start and end of the huge pages that begin in the chunk: each is mapped whole, with the chunk that it begins
        in. All are below the watermark, which is at the end of one."""
        return round_up(self.offset, HUGE_PAGE_BYTES), round_up(self.end_offset, HUGE_PAGE_BYTES)


@dataclass(slots=True)
class ExtentMemory:
    """The memory of chunks that are parts of extents: the `SlotMemory` of a `MappedPool`, which says who calls what.
    `close` closes the extents."""

    registrar: PacedRegistrar
    close: Callable[[], None]
    resident_bytes: int = field(default=0, init=False)
    numa_notice: str | None = field(default=None, init=False)

    def commit(self, chunk: Chunk) -> None:
        assert isinstance(chunk, ExtentChunk)
        self.registrar.prepare_thread()
        start, end = chunk.pages()
        if start < end:
            chunk.extent.mapping.map(start, end)
        self.resident_bytes += end - start

    def decommit(self, chunk: Chunk) -> None:
        assert isinstance(chunk, ExtentChunk)
        start, end = chunk.pages()
        if start < end:
            chunk.extent.mapping.unmap(start, end)
        self.resident_bytes -= end - start

    def bytes_by_node(self, chunk: Chunk) -> Counter[int]:
        assert isinstance(chunk, ExtentChunk)
        return bytes_by_node(chunk.address, chunk.num_bytes, _NODE_STEP)

    def register(self, chunk: Chunk) -> None:
        assert isinstance(chunk, ExtentChunk)
        self.registrar.register(chunk.address, chunk.num_bytes)

    def unregister(self, chunk: Chunk) -> None:
        assert isinstance(chunk, ExtentChunk)
        self.registrar.unregister(chunk.address, chunk.num_bytes)

    def unregister_at_close(self, chunk: Chunk) -> None:
        assert isinstance(chunk, ExtentChunk)
        what = f"slots {chunk.first_slot}-{chunk.end_slot - 1}"
        self.registrar.unregister_at_close(chunk.address, chunk.num_bytes, what)
