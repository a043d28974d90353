"""An extent of one rank's pool: its memory, its slots, and the chunks in which it is mapped and registered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstow.memory.chunks import Chunk, ChunkGrid
from kvstow.memory.extentmapping import ExtentMapping
from kvstow.memory.numa import bytes_by_node
from kvstow.memory.pacedregistrar import PacedRegistrar
from kvstow.memory.region import HUGE_PAGE_BYTES, round_up

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
    """The memory of chunks that are parts of extents: the `PoolMemory` of a `MappedPool`, which says who calls what.
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
