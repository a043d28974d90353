"""One rank's pool in memory of the node service: extents, mapped and registered in the background."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from kvstow.errors import ConflictError, InvalidRequestError
from kvstow.memory.chunks import Chunk, ChunkGrid
from kvstow.memory.extentmapping import ExtentMapping
from kvstow.memory.hoststeps import HostSteps
from kvstow.memory.numa import bytes_by_node
from kvstow.memory.pace import LATENCY_TARGET, AdaptivePace, Pace
from kvstow.memory.pacedregistrar import PacedRegistrar
from kvstow.memory.pinning import Registrar
from kvstow.memory.region import HUGE_PAGE_BYTES, round_up
from kvstow.memory.slotpool import Int64Array, SlotPool

_MAX_SLOTS = 1 << 32  # slots are 32-bit numbers on the wire
_NODE_STEP = 16 << 20  # bytes between two samples of the NUMA node


class Grant(Protocol):
    """What the service says of an extent; `kvstow.attach.extentcalls.ExtentGrant` is one."""

    @property
    def extent_id(self) -> int: ...
    @property
    def first_slot(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def populated_bytes(self) -> int: ...


class HeldExtent(NamedTuple):
    """An extent of an earlier session that is still mapped. The descriptor stays the pool's."""

    extent_id: int
    num_bytes: int
    fd: int


class _Place(NamedTuple):
    """Which memory an extent is, and which slots it has."""

    device: int
    inode: int
    num_bytes: int
    first_slot: int
    num_slots: int


@dataclass(eq=False, slots=True)
class _MappedExtent:
    """`is_granted`: in the current session. A revoked one is on its way out; `is_awaited`: the service waits for it."""

    extent_id: int
    place: _Place
    grid: ChunkGrid
    mapping: ExtentMapping
    populated_bytes: int
    is_granted: bool = True
    is_revoked: bool = False
    is_awaited: bool = False

    @property
    def first_slot(self) -> int:
        return self.place.first_slot

    @property
    def end_slot(self) -> int:
        return self.place.first_slot + self.place.num_slots

    @property
    def shown_slots(self) -> int:
        """Of its slots, those that lie below the watermark and end where a chunk may end."""
        slots = min(self.place.num_slots, self.populated_bytes // self.grid.slot_stride)
        return slots if slots == self.place.num_slots else slots - slots % self.grid.unit_slots


@dataclass(frozen=True, slots=True)
class _ExtentChunk(Chunk):
    """`offset` counts from the beginning of the extent."""

    extent: _MappedExtent

    @property
    def address(self) -> int:
        return self.extent.mapping.address + self.offset

    def pages(self) -> tuple[int, int]:
        """Start and end of the huge pages that begin in the chunk: each is mapped whole, with the chunk that it begins
        in. All are below the watermark, which is at the end of one."""
        return round_up(self.offset, HUGE_PAGE_BYTES), round_up(self.end_offset, HUGE_PAGE_BYTES)


class MappedPool(SlotPool):
    """Slots in extents that the node service has granted, as far as it has populated them.

    Each extent has address space of its own, aligned to 2 MiB, and its slots lie in it back to back. One range for all
    slots would put all extents but the first where the kernel cannot map huge pages, unless the size of a slot divides
    2 MiB. So `addresses` looks up the extent.

    Slots become usable from slot 0 on, without a gap. What the service grants and revokes decides, and not the target,
    which is for display: grants may come before the target that goes with them. Memory goes back when an extent is
    revoked, or not taken back in a new session. It goes before new memory is mapped, so there is never more than one
    pool's worth.

    Nothing above the populated bytes is mapped: the kernel would charge it to this process.
    """

    def __init__(
        self,
        slot_bytes: int,
        registrar: Registrar,
        *,
        pace: Callable[[HostSteps], Pace] | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Has no slots yet. `pace`: makes the pace of registering; adaptive by default."""
        pace = pace or partial(AdaptivePace, LATENCY_TARGET)
        super().__init__(slot_bytes, _MAX_SLOTS, 0, registrar, pace, clock=clock, cpu_clock=cpu_clock)
        self._memory = _ExtentMemory(self._paced, self._close_extents)
        self._stride = slot_bytes
        self._extents: list[_MappedExtent] = []
        """In the order of their slots, which do not overlap."""
        self._arriving: list[_MappedExtent] = []
        """Granted; their slots are still those of extents on their way out."""
        self._released: list[int] = []
        self._usable_end = 0
        """All slots below are of granted extents, without a gap."""
        self._kept_end = self.max_slots
        """The first slot of a revoked extent."""
        self._table = _AddressTable()

    @property
    def slot_stride(self) -> int:
        return self._stride

    def addresses(self, slots: Int64Array) -> Int64Array:
        return self._table.addresses(slots)

    # -- what the service says ------------------------------------------------------------------------------

    def begin_session(self) -> None:
        """The extents are those of an earlier session from now on: none of their slots is usable until they are granted
        again. No copy may be under way."""
        with self._state:
            for extent in (*self._extents, *self._arriving):
                extent.is_granted = extent.is_awaited = False
            for extent in self._arriving:
                extent.is_revoked = True
            self._released.clear()
            self._stop_growth()
            self._changed()

    def held_extents(self) -> list[HeldExtent]:
        """The extents of earlier sessions, for the service to take back. Their descriptors stay open until `keep`."""
        with self._state:
            return [
                HeldExtent(extent.extent_id, extent.place.num_bytes, extent.mapping.fd)
                for extent in self._extents
                if not extent.is_granted and not extent.is_revoked
            ]

    def keep(self, extent_ids: Iterable[int]) -> None:
        """The service has taken back these of the `held_extents`, and will grant them again. The others are given
        back."""
        kept = set(extent_ids)
        with self._state:
            for extent in self._extents:
                if not extent.is_granted and extent.extent_id not in kept:
                    extent.is_revoked = True
            self._changed()

    def grant(self, slot_stride: int, grants: Sequence[Grant], fds: Sequence[int]) -> None:
        """These extents may be mapped, with a descriptor each; the pool owns the descriptors, also if this raises. An
        extent that is mapped already stays as it is.

        Raises `ConflictError` if slots overlap or their stride has changed, `InvalidRequestError` for a stride that is
        too short, and `PinError` without address space.
        """
        left = list(fds)
        try:
            if slot_stride < self.slot_bytes:
                raise InvalidRequestError(f"slots are {slot_stride} bytes apart; allowed: {self.slot_bytes} or more")
            if slot_stride != self._stride and (self._extents or self._arriving):
                raise ConflictError(f"slots are {slot_stride} bytes apart, and were {self._stride} before")
            self._stride = slot_stride
            for grant in grants:
                self._grant_one(grant, left.pop(0))
        finally:
            for fd in left:
                os.close(fd)

    def _grant_one(self, grant: Grant, fd: int) -> None:
        try:
            found = os.fstat(fd)
            place = _Place(found.st_dev, found.st_ino, grant.num_bytes, grant.first_slot, grant.num_slots)
            if self._is_mapped_already(grant, place):
                os.close(fd)
                return
            grid = ChunkGrid.of_stride(self._stride, grant.num_slots, self._pace.chunk_bytes)
            mapping = ExtentMapping(fd, grant.num_bytes)
        except BaseException:
            os.close(fd)
            raise
        extent = _MappedExtent(grant.extent_id, place, grid, mapping, _whole_pages(grant.populated_bytes))
        with self._state:
            try:
                self._arrive(extent)
            except BaseException:
                mapping.close()
                raise
            self._changed()

    def _is_mapped_already(self, grant: Grant, place: _Place) -> bool:
        with self._state:
            for extent in self._extents:
                if extent.place == place and not extent.is_granted and not extent.is_revoked:
                    extent.extent_id, extent.is_granted = grant.extent_id, True
                    extent.populated_bytes = max(extent.populated_bytes, _whole_pages(grant.populated_bytes))
                    self._changed()
                    return True
        return False

    def set_populated(self, extents: Iterable[tuple[int, int]]) -> None:
        """So many bytes of these extents have memory. A smaller number than before changes nothing."""
        with self._state:
            known = {extent.extent_id: extent for extent in self._granted()}
            for extent_id, num_bytes in extents:
                if extent_id in known:
                    extent = known[extent_id]
                    most = min(num_bytes, extent.place.num_bytes)
                    extent.populated_bytes = max(extent.populated_bytes, _whole_pages(most))
            self._changed()

    def revoke(self, extent_ids: Iterable[int]) -> None:
        """Begin no copy in these extents from now on, and give them back when those under way have ended:
        `take_released` tells. Retries what has failed."""
        revoked = set(extent_ids)
        with self._state:
            for extent in self._granted():
                if extent.extent_id in revoked:
                    extent.is_revoked = extent.is_awaited = True
            self._failure = None
            self._changed()

    def registered_slots(self) -> list[tuple[int, int]]:
        """By granted extent: how many of its slots are registered and may be used."""
        with self._state:
            covered = self._covered()
            return [
                (
                    extent.extent_id,
                    0 if extent.is_revoked else max(0, min(covered, extent.end_slot) - extent.first_slot),
                )
                for extent in self._extents
                if extent.is_granted
            ]

    def take_released(self) -> list[int]:
        """The revoked extents of which nothing is mapped, registered or open any more, since the last call."""
        with self._state:
            released, self._released = self._released, []
            return released

    # -- the pinning thread ---------------------------------------------------------------------------------

    def _give_back_step(self) -> Callable[[], None] | None:
        for extent in (*self._extents, *self._arriving):
            if extent.is_revoked and (extent in self._arriving or self._covered() <= extent.first_slot):
                return partial(self._retire, extent)
        return super()._give_back_step()

    def _retire(self, extent: _MappedExtent) -> None:
        """Nothing of the extent is registered any more."""
        extent.mapping.close()
        with self._state:
            for extents in (self._extents, self._arriving):
                if extent in extents:
                    extents.remove(extent)
            if extent.is_awaited:
                self._released.append(extent.extent_id)
            arriving, self._arriving = self._arriving, []
            for other in arriving:
                self._arrive(other)
            self._changed()

    def _next_chunk(self, covered: int) -> Chunk | None:
        extent = next((one for one in self._extents if one.first_slot <= covered < one.end_slot), None)
        if extent is None or not extent.is_granted or extent.is_revoked:
            return None
        done, shown = covered - extent.first_slot, extent.shown_slots
        if done >= shown:
            return None
        chunk = extent.grid.next_chunk(done, shown, self._pace.chunk_bytes)
        first, end = extent.first_slot + chunk.first_slot, extent.first_slot + chunk.end_slot
        return _ExtentChunk(first, end, chunk.offset, chunk.num_bytes, extent)

    def _forget_limits(self) -> None:
        """There are none: the memory is the service's."""

    # -- under `_state` -------------------------------------------------------------------------------------

    def _chunks_left(self) -> int:
        covered = self._covered()
        slots = sum(max(0, extent.end_slot - max(covered, extent.first_slot)) for extent in self._granted())
        return -(-slots * self._stride // self._pace.chunk_bytes)

    def _usable(self) -> int:
        return self._usable_end

    def _wanted(self) -> int:
        return self._kept_end

    def _granted(self) -> list[_MappedExtent]:
        return [extent for extent in (*self._extents, *self._arriving) if extent.is_granted and not extent.is_revoked]

    def _arrive(self, extent: _MappedExtent) -> None:
        """Let its slots be the pool's, once no other extent has them."""
        others = [
            one
            for one in (*self._extents, *self._arriving)
            if one.first_slot < extent.end_slot and extent.first_slot < one.end_slot
        ]
        for other in others:
            if other.is_granted and not other.is_revoked:
                raise ConflictError(
                    f"extents {other.extent_id} and {extent.extent_id} both have slots from "
                    f"{max(other.first_slot, extent.first_slot)} on"
                )
            other.is_revoked = True
        if others:
            self._arriving.append(extent)
        else:
            self._extents.append(extent)
            self._extents.sort(key=lambda one: one.first_slot)

    def _changed(self) -> None:
        """Extents have come, gone, or changed."""
        end = 0
        for extent in self._extents:
            if extent.first_slot != end or not extent.is_granted or extent.is_revoked:
                break
            end = extent.end_slot
        self._usable_end = end
        revoked = [extent.first_slot for extent in self._extents if extent.is_revoked]
        self._kept_end = min(revoked, default=self.max_slots)
        if self._kept_end < self._queue_end:
            self._stop_growth()
        self._table = _AddressTable(self._extents, self._stride)
        self._state.notify_all()

    def _close_extents(self) -> None:
        for extent in (*self._extents, *self._arriving):
            extent.mapping.close()
        self._extents, self._arriving = [], []


@dataclass(slots=True)
class _ExtentMemory:
    """The memory of chunks that are parts of extents."""

    registrar: PacedRegistrar
    close: Callable[[], None]
    resident_bytes: int = field(default=0, init=False)
    numa_notice: str | None = field(default=None, init=False)

    def commit(self, chunk: Chunk) -> None:
        assert isinstance(chunk, _ExtentChunk)
        self.registrar.prepare_thread()
        start, end = chunk.pages()
        if start < end:
            chunk.extent.mapping.map(start, end)
        self.resident_bytes += end - start

    def decommit(self, chunk: Chunk) -> None:
        assert isinstance(chunk, _ExtentChunk)
        start, end = chunk.pages()
        if start < end:
            chunk.extent.mapping.unmap(start, end)
        self.resident_bytes -= end - start

    def bytes_by_node(self, chunk: Chunk) -> Counter[int]:
        assert isinstance(chunk, _ExtentChunk)
        return bytes_by_node(chunk.address, chunk.num_bytes, _NODE_STEP)

    def register(self, chunk: Chunk) -> None:
        assert isinstance(chunk, _ExtentChunk)
        self.registrar.register(chunk.address, chunk.num_bytes)

    def unregister(self, chunk: Chunk) -> None:
        assert isinstance(chunk, _ExtentChunk)
        self.registrar.unregister(chunk.address, chunk.num_bytes)

    def unregister_at_close(self, chunk: Chunk) -> None:
        assert isinstance(chunk, _ExtentChunk)
        what = f"slots {chunk.first_slot}-{chunk.end_slot - 1}"
        self.registrar.unregister_at_close(chunk.address, chunk.num_bytes, what)


class _AddressTable:
    """Where the slots of extents lie. Immutable, so any thread may use it without a lock. O(log extents) for a slot."""

    def __init__(self, extents: Sequence[_MappedExtent] = (), stride: int = 0) -> None:
        self._first = np.array([extent.first_slot for extent in extents], np.int64)
        self._address = np.array([extent.mapping.address for extent in extents], np.int64)
        self._stride = stride

    def addresses(self, slots: Int64Array) -> Int64Array:
        at = np.searchsorted(self._first, slots, side="right") - 1
        return self._address[at] + (slots - self._first[at]) * self._stride


def _whole_pages(num_bytes: int) -> int:
    return num_bytes - num_bytes % HUGE_PAGE_BYTES
