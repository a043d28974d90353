"""One rank's pool in extents of the node service, mapped and registered in the background."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from kvstow.bytesize import format_size
from kvstow.errors import ConflictError, InvalidRequestError, PinError
from kvstow.memory.chunks import Chunk, ChunkGrid, ChunkMemory
from kvstow.memory.hoststeps import HostSteps
from kvstow.memory.pinning import LATENCY_TARGET, AdaptivePace, Pace, Registrar
from kvstow.memory.region import (
    HUGE_PAGE_BYTES,
    MADV_POPULATE_READ,
    PAGE_BYTES,
    HostRegion,
    error_text,
    libc,
    quick,
    round_up,
)
from kvstow.memory.slotpool import Int64Array, SlotPool

_PIECE_BYTES = 8 << 20
"""How many bytes one call makes present. An mmap of any other thread waits until the call ends."""
_MAX_SLOTS = 1 << 32
"""The largest number of slots: their numbers have 32 bits on the wire."""


class Grant(Protocol):
    """An extent that the service grants, such as a `kvstow.attach.calls.ExtentGrant`."""

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


class MappedExtent:
    """An extent in address space of its own, aligned to a huge page.

    `map` and `unmap` choose which of its bytes are mapped. A child process inherits no mapping. The pool changes the
    public fields while it holds its lock, and only one thread at a time maps. The owner calls `close`, which is
    idempotent.
    """

    def __init__(self, grant: Grant, memory: ExtentMemory, fd: int, grid: ChunkGrid) -> None:
        """Takes over `fd`. Raises `PinError` if there is no address space; the caller then still owns `fd`."""
        self.extent_id, self.num_bytes, self.memory, self.grid = grant.extent_id, grant.num_bytes, memory, grid
        self.first_slot, self.end_slot = grant.first_slot, grant.first_slot + grant.num_slots
        self.populated_bytes = 0
        self.is_granted = True
        """The current session has granted it, and not only an earlier one."""
        self.is_revoked = False
        """No new copy may use it. It is closed when the copies under way have ended."""
        self.must_be_reported = False
        """The service has revoked it in this session, and waits for the report that it is released."""
        self._region = HostRegion(grant.num_bytes)
        self.address = self._region.address
        self._fd = fd

    @property
    def may_be_used(self) -> bool:
        return self.is_granted and not self.is_revoked

    def raise_populated(self, num_bytes: int) -> None:
        """Record that the first `num_bytes` are populated. A smaller number than before changes nothing."""
        num_bytes = min(num_bytes, self.num_bytes)
        self.populated_bytes = max(self.populated_bytes, num_bytes - num_bytes % HUGE_PAGE_BYTES)

    def next_chunk(self, slot: int, num_bytes: int) -> ExtentChunk | None:
        """Return the chunk that begins with this slot, or None if the chunk is not populated yet. The chunk has at most
        `num_bytes`, or the size of the smallest chunk if that is more."""
        begin = slot - self.first_slot
        shown = min(self.grid.max_slots, self.populated_bytes // self.grid.slot_stride)
        if shown < self.grid.max_slots:
            shown -= shown % self.grid.unit_slots  # chunks end at a multiple of `unit_slots`
        if begin >= shown:
            return None
        chunk = self.grid.next_chunk(begin, shown, num_bytes)
        first, end = self.first_slot + chunk.first_slot, self.first_slot + chunk.end_slot
        return ExtentChunk(first, end, chunk.offset, chunk.num_bytes, self)

    def map(self, start: int, end: int) -> None:
        """Map these bytes and make their pages present, which makes registering them twice as fast. If it raises
        `PinError`, nothing of the range is mapped.

        The bytes are whole pages of 2 MiB, and they are populated: the kernel would populate others now, and charge the
        memory to this process.
        """
        self._region.map_file(start, end - start, self._fd, start)
        try:
            for offset in range(start, end, _PIECE_BYTES):
                _make_present(self.address + offset, min(_PIECE_BYTES, end - offset))
        except BaseException:
            self.unmap(start, end)
            raise

    def unmap(self, start: int, end: int) -> None:
        self._region.unmap_file(start, end - start, quick)

    def close(self) -> None:
        """Unmap everything, and close the descriptor."""
        self._region.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _make_present(address: int, num_bytes: int) -> None:
    if libc.madvise(address, num_bytes, MADV_POPULATE_READ) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise PinError("out_of_memory", f"mapping {format_size(num_bytes)} failed: {error_text()}")
    # A kernel before 5.14 does not know MADV_POPULATE_READ. Reading each page has the same effect.
    pages = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
    pages[::PAGE_BYTES].max()


class ExtentMemory(NamedTuple):
    """Identifies an extent's memory by its file, and the slots that it holds. It is the same in every session."""

    device: int
    inode: int
    num_bytes: int
    first_slot: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class ExtentChunk(Chunk):
    """A chunk of an extent. Its `offset` counts from the beginning of the extent."""

    extent: MappedExtent

    def pages(self) -> tuple[int, int]:
        """Start and end of the huge pages that begin in the chunk. A huge page is mapped with the chunk in which it
        begins. All these pages are populated, because the watermark always lies at the end of a huge page."""
        return round_up(self.offset, HUGE_PAGE_BYTES), round_up(self.end_offset, HUGE_PAGE_BYTES)


class _ExtentChunks(ChunkMemory):
    """Maps the chunks of extents."""

    def commit(self, chunk: Chunk, *, host_is_idle: bool) -> None:
        assert isinstance(chunk, ExtentChunk)
        start, end = chunk.pages()
        if start < end:
            chunk.extent.map(start, end)
        self.resident_bytes += end - start

    def decommit(self, chunk: Chunk) -> None:
        assert isinstance(chunk, ExtentChunk)
        start, end = chunk.pages()
        if start < end:
            chunk.extent.unmap(start, end)
        self.resident_bytes -= end - start

    def address_of(self, chunk: Chunk) -> int:
        assert isinstance(chunk, ExtentChunk)
        return chunk.extent.address + chunk.offset

    def forget_limits(self) -> None:
        """The service checks the limits, because the memory is its own."""


class _AddressTable:
    """Finds the address of a slot in O(log extents). Immutable, so any thread may use it without a lock."""

    def __init__(self, extents: Sequence[MappedExtent] = (), stride: int = 0) -> None:
        self._first = np.array([extent.first_slot for extent in extents], np.int64)
        self._address = np.array([extent.address for extent in extents], np.int64)
        self._stride = stride

    def addresses(self, slots: Int64Array) -> Int64Array:
        extent = np.searchsorted(self._first, slots, side="right") - 1
        return self._address[extent] + (slots - self._first[extent]) * self._stride


class MappedPool(SlotPool):
    """A pool whose slots lie in extents that the node service grants and populates.

    Each extent has address space of its own, and its slots lie in it back to back, so `addresses` looks up the extent
    of each slot. One range of addresses for all slots would need no look-up. But extents after the first would then not
    begin at a multiple of 2 MiB, unless the size of a slot divides 2 MiB, and the kernel could not map them as huge
    pages.

    Slots become usable from slot 0 on, without a gap. Grants and revocations decide which slots there are. The target
    is for display only, because a grant may arrive before the target that belongs to it. An extent's memory goes back
    when the service revokes it, or does not grant it again in a new session. It goes back before new memory is mapped,
    so the process never maps more memory than the pool has. Bytes above the watermark are not mapped, because the
    kernel would charge them to this process.

    An extent belongs to the session that granted it. Extents of earlier sessions stay mapped until the new session has
    granted everything. No slot is in two extents in place. A new extent may have slots of extents that are being
    released. It then waits among the arriving extents, and comes into its place when the last of those is closed.
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
        """Make a pool without slots. `pace` makes the pace of register calls, which is an `AdaptivePace` by default."""
        steps = HostSteps(clock)
        made_pace = AdaptivePace(LATENCY_TARGET, steps) if pace is None else pace(steps)
        super().__init__(slot_bytes, _MAX_SLOTS, 0, _ExtentChunks(), registrar, steps, made_pace, cpu_clock=cpu_clock)
        self._stride = slot_bytes
        self._in_place: list[MappedExtent] = []
        """The extents in the order of their slots."""
        self._arriving: list[MappedExtent] = []
        """Granted extents that wait until revoked ones have given up their slots."""
        self._released: list[int] = []
        """Ids of released extents that `take_released` has not returned yet."""
        self._table = _AddressTable()
        self._granted_end = 0
        """Granted extents hold all slots below this one, without a gap."""
        self._revoked_slot = _MAX_SLOTS
        """The first slot of a revoked extent."""

    @property
    def slot_stride(self) -> int:
        return self._stride

    def addresses(self, slots: Int64Array) -> Int64Array:
        return self._table.addresses(slots)

    # -- messages of the service ------------------------------------------------------------------------------

    def begin_session(self) -> None:
        """Begin a new session. The present extents now belong to an earlier one, so their slots are unusable until they
        are granted again. No copy may be under way."""
        with self._state:
            for extent in self._all():
                extent.is_granted = extent.must_be_reported = False
            for extent in self._arriving:
                extent.is_revoked = True
            self._released.clear()
            self._stop_growth()
            self._extents_changed()

    def drop_earlier(self) -> None:
        """Give back the extents that only earlier sessions had. Call it after this session has granted everything."""
        with self._state:
            for extent in self._in_place:
                if not extent.is_granted:
                    extent.is_revoked = True
            self._extents_changed()

    def grant(self, slot_stride: int, grants: Sequence[Grant], fds: Sequence[int]) -> None:
        """Let the pool map these extents. There is one descriptor for each, and the pool owns all of them even if this
        raises. An extent that is mapped already stays mapped.

        Raises `ConflictError` if slots overlap or their stride has changed, `InvalidRequestError` for a stride that is
        too short, and `PinError` without address space.
        """
        left = list(fds)
        try:
            if slot_stride < self.slot_bytes:
                raise InvalidRequestError(f"slots are {slot_stride} bytes apart; allowed: {self.slot_bytes} or more")
            with self._state:
                if slot_stride != self._stride and self._all():
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
            memory = ExtentMemory(found.st_dev, found.st_ino, grant.num_bytes, grant.first_slot, grant.num_slots)
            if self._grant_again(memory, grant):
                os.close(fd)
                return
            grid = ChunkGrid.of_stride(self._stride, grant.num_slots, self._pace.chunk_bytes)
            extent = MappedExtent(grant, memory, fd, grid)
        except BaseException:
            os.close(fd)
            raise
        extent.raise_populated(grant.populated_bytes)
        with self._state:
            try:
                self._place(extent)
            except BaseException:
                extent.close()
                raise
            self._extents_changed()

    def _grant_again(self, memory: ExtentMemory, grant: Grant) -> bool:
        """Grant an extent of an earlier session again if it is this very memory. Returns whether there is one."""
        with self._state:
            for extent in self._in_place:
                if extent.memory == memory and not extent.is_granted and not extent.is_revoked:
                    extent.extent_id, extent.is_granted = grant.extent_id, True
                    extent.raise_populated(grant.populated_bytes)
                    self._extents_changed()
                    return True
        return False

    def set_populated(self, extents: Iterable[tuple[int, int]]) -> None:
        """Record how many bytes of these extents are populated, as pairs of extent id and bytes. A smaller number than
        before changes nothing."""
        with self._state:
            known = {extent.extent_id: extent for extent in self._granted()}
            for extent_id, num_bytes in extents:
                if extent_id in known:
                    known[extent_id].raise_populated(num_bytes)
            self._extents_changed()

    def revoke(self, extent_ids: Iterable[int]) -> None:
        """Let no new copy use these extents, and give them back when the copies under way have ended. `take_released`
        returns them then. This is also a new attempt after a failure."""
        revoked = set(extent_ids)
        with self._state:
            for extent in self._granted():
                if extent.extent_id in revoked:
                    extent.is_revoked = extent.must_be_reported = True
            self._failure = None
            self._extents_changed()

    def registered_slots(self) -> list[tuple[int, int]]:
        """Return pairs: the id of each granted extent, and how many of its slots are registered and may be used."""
        with self._state:
            covered = self._covered()
            return [
                (one.extent_id, 0 if one.is_revoked else max(0, min(covered, one.end_slot) - one.first_slot))
                for one in self._in_place
                if one.is_granted
            ]

    def take_released(self) -> list[int]:
        """Return the ids of the revoked extents that were closed since the last call. Nothing of them is mapped,
        registered or open any more."""
        with self._state:
            released, self._released = self._released, []
            return released

    # -- the pinning thread ---------------------------------------------------------------------------------

    def _give_back_step(self) -> Callable[[], None] | None:
        covered = self._covered()
        for extent in self._all():
            has_registered_slots = extent not in self._arriving and covered > extent.first_slot
            if extent.is_revoked and not has_registered_slots:
                return partial(self._close_extent, extent)
        return super()._give_back_step()

    def _close_extent(self, extent: MappedExtent) -> None:
        """Close an extent without registered slots, and put the arriving extents that wait for its slots in place."""
        extent.close()
        with self._state:
            for extents in (self._in_place, self._arriving):
                if extent in extents:
                    extents.remove(extent)
            if extent.must_be_reported:
                self._released.append(extent.extent_id)
            arriving, self._arriving = self._arriving, []
            for other in arriving:
                self._place(other)
            self._extents_changed()

    def _next_chunk(self, covered: int) -> Chunk | None:
        extent = next((one for one in self._in_place if one.first_slot <= covered < one.end_slot), None)
        if extent is None or not extent.may_be_used:
            return None
        return extent.next_chunk(covered, self._pace.chunk_bytes)

    def _close_memory(self) -> None:
        for extent in self._all():
            extent.close()
        self._in_place, self._arriving = [], []

    # -- under `_state` -------------------------------------------------------------------------------------

    def _chunks_left(self) -> int:
        covered = self._covered()
        slots = sum(max(0, one.end_slot - max(covered, one.first_slot)) for one in self._granted())
        return -(-slots * self._stride // self._pace.chunk_bytes)

    def _usable_end(self) -> int:
        return self._granted_end

    def _wanted_end(self) -> int:
        return self._revoked_slot

    def _all(self) -> list[MappedExtent]:
        return [*self._in_place, *self._arriving]

    def _granted(self) -> list[MappedExtent]:
        return [extent for extent in self._all() if extent.may_be_used]

    def _place(self, extent: MappedExtent) -> None:
        """Put the extent in place. While other extents have some of its slots, revoke those and let this one wait.
        Raises `ConflictError` if the current session has granted one of the others."""
        others = [one for one in self._all() if one.first_slot < extent.end_slot and extent.first_slot < one.end_slot]
        for other in others:
            if other.may_be_used:
                raise ConflictError(
                    f"extents {other.extent_id} and {extent.extent_id} both have slots from "
                    f"{max(other.first_slot, extent.first_slot)} on"
                )
            other.is_revoked = True
        if others:
            self._arriving.append(extent)
        else:
            self._in_place.append(extent)
            self._in_place.sort(key=lambda one: one.first_slot)

    def _extents_changed(self) -> None:
        end = 0
        for extent in self._in_place:
            if extent.first_slot != end or not extent.may_be_used:
                break
            end = extent.end_slot
        self._granted_end = end
        self._revoked_slot = min((one.first_slot for one in self._in_place if one.is_revoked), default=_MAX_SLOTS)
        self._table = _AddressTable(self._in_place, self._stride)
        self._stop_growth(above=self._revoked_slot)
        self._state.notify_all()
