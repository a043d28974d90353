"""One rank's pool in extents of the node service, mapped and registered in the background."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from kvstow.bytesize import format_size
from kvstow.errors import ConflictError, InvalidRequestError, PinError
from kvstow.memory.chunks import Chunk, ChunkGrid
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

_PIECE_BYTES = 8 << 20  # per call that makes pages present: meanwhile an mmap of any thread waits
_MAX_SLOTS = 1 << 32  # slots are 32-bit numbers on the wire


class Grant(Protocol):
    """What the service grants; `kvstow.attach.calls.ExtentGrant` is one."""

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
    """An extent in address space of its own, aligned to a huge page. `map` and `unmap` determine which of its bytes are
    mapped; a child process inherits none. The owner calls `close`, which is idempotent.

    `is_granted`: in the current session. A revoked extent is on its way out; `is_awaited`: the service waits for it.
    These fields are changed under the pool's lock, and one thread at a time maps.
    """

    def __init__(self, grant: Grant, place: tuple[int, ...], fd: int, grid: ChunkGrid) -> None:
        """Takes over `fd`. Raises `PinError` if there is no address space; then the caller still owns it. `place`:
        which memory it is, and which slots it has."""
        self.extent_id, self.num_bytes, self.place, self.grid = grant.extent_id, grant.num_bytes, place, grid
        self.first_slot, self.end_slot = grant.first_slot, grant.first_slot + grant.num_slots
        self.populated_bytes = 0
        self.is_granted, self.is_revoked, self.is_awaited = True, False, False
        self._region = HostRegion(grant.num_bytes)
        self.address = self._region.address
        self._fd = fd

    @property
    def may_be_used(self) -> bool:
        return self.is_granted and not self.is_revoked

    def raise_populated(self, num_bytes: int) -> None:
        """This many bytes have memory. A smaller number than before changes nothing."""
        num_bytes = min(num_bytes, self.num_bytes)
        self.populated_bytes = max(self.populated_bytes, num_bytes - num_bytes % HUGE_PAGE_BYTES)

    def next_chunk(self, slot: int, num_bytes: int) -> ExtentChunk | None:
        """The chunk that begins with this slot, of `num_bytes` at most or the smallest possible; None if it has no
        memory yet."""
        done = slot - self.first_slot
        shown = min(self.grid.max_slots, self.populated_bytes // self.grid.slot_stride)
        if shown < self.grid.max_slots:
            shown -= shown % self.grid.unit_slots  # a chunk may end there
        if done >= shown:
            return None
        chunk = self.grid.next_chunk(done, shown, num_bytes)
        first, end = self.first_slot + chunk.first_slot, self.first_slot + chunk.end_slot
        return ExtentChunk(first, end, chunk.offset, chunk.num_bytes, self)

    def map(self, start: int, end: int) -> None:
        """Map these bytes, which are whole pages of 2 MiB and have memory already, and make their pages present, so
        that registering them is twice as fast. Raises `PinError`, with nothing of the range mapped.

        Bytes without memory would get some, at this process's expense."""
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
    pages = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))  # a kernel before 5.14
    pages[::PAGE_BYTES].max()


@dataclass(frozen=True, slots=True)
class ExtentChunk(Chunk):
    """`offset` counts from the beginning of the extent."""

    extent: MappedExtent

    def pages(self) -> tuple[int, int]:
        """Start and end of the huge pages that begin in the chunk: each is mapped whole, with the chunk that it begins
        in. All are below the watermark, which is at the end of one."""
        return round_up(self.offset, HUGE_PAGE_BYTES), round_up(self.end_offset, HUGE_PAGE_BYTES)


class _AddressTable:
    """Where the slots of extents lie. Immutable, so any thread may use it without a lock. O(log extents) for a slot."""

    def __init__(self, extents: Sequence[MappedExtent] = (), stride: int = 0) -> None:
        self._first = np.array([extent.first_slot for extent in extents], np.int64)
        self._address = np.array([extent.address for extent in extents], np.int64)
        self._stride = stride

    def addresses(self, slots: Int64Array) -> Int64Array:
        at = np.searchsorted(self._first, slots, side="right") - 1
        return self._address[at] + (slots - self._first[at]) * self._stride


class MappedPool(SlotPool):
    """Slots in extents that the node service has granted, as far as it has populated them.

    Each extent has address space of its own, and its slots lie in it back to back. One range for all slots would put
    all extents but the first where the kernel cannot map huge pages, unless the size of a slot divides 2 MiB. So
    `addresses` looks up the extent.

    Slots become usable from slot 0 on, without a gap. What the service grants and revokes decides, and not the target,
    which is for display: grants may come before the target that goes with them. Memory goes back when an extent is
    revoked, or not granted again in a new session. It goes before new memory is mapped, so there is never more than one
    pool's worth. Nothing above the populated bytes is mapped: the kernel would charge it to this process.

    An extent belongs to the session that granted it; those of earlier sessions are held until this one has granted all
    that there is. Extents in place have slots of their own. An extent that is granted with slots of others, which are
    on their way out, arrives: it comes into its place when the last of them has been retired.
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
        self._stride = slot_bytes
        self._in_place: list[MappedExtent] = []  # in the order of their slots
        self._arriving: list[MappedExtent] = []
        self._released: list[int] = []
        self._table = _AddressTable()
        self._usable_end = 0  # all slots below are of granted extents, without a gap
        self._kept_end = _MAX_SLOTS  # the first slot of a revoked extent

    @property
    def slot_stride(self) -> int:
        return self._stride

    def addresses(self, slots: Int64Array) -> Int64Array:
        return self._table.addresses(slots)

    # -- messages of the service ------------------------------------------------------------------------------

    def begin_session(self) -> None:
        """The extents are those of an earlier session from now on: none of their slots is usable until they are granted
        again. No copy may be under way."""
        with self._state:
            for extent in self._all():
                extent.is_granted = extent.is_awaited = False
            for extent in self._arriving:
                extent.is_revoked = True
            self._released.clear()
            self._stop_growth()
            self._extents_changed()

    def drop_earlier(self) -> None:
        """Give back the extents of earlier sessions: those that this session has too were granted again."""
        with self._state:
            for extent in self._in_place:
                if not extent.is_granted:
                    extent.is_revoked = True
            self._extents_changed()

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
            place = found.st_dev, found.st_ino, grant.num_bytes, grant.first_slot, grant.num_slots
            if self._grant_again(place, grant):
                os.close(fd)
                return
            grid = ChunkGrid.of_stride(self._stride, grant.num_slots, self._pace.chunk_bytes)
            extent = MappedExtent(grant, place, fd, grid)
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

    def _grant_again(self, place: tuple[int, ...], grant: Grant) -> bool:
        """Whether an extent of an earlier session is this very memory, with the same slots: it is granted then."""
        with self._state:
            for extent in self._in_place:
                if extent.place == place and not extent.is_granted and not extent.is_revoked:
                    extent.extent_id, extent.is_granted = grant.extent_id, True
                    extent.raise_populated(grant.populated_bytes)
                    self._extents_changed()
                    return True
        return False

    def set_populated(self, extents: Iterable[tuple[int, int]]) -> None:
        """This many bytes of these extents have memory. A smaller number than before changes nothing."""
        with self._state:
            known = {extent.extent_id: extent for extent in self._granted()}
            for extent_id, num_bytes in extents:
                if extent_id in known:
                    known[extent_id].raise_populated(num_bytes)
            self._extents_changed()

    def revoke(self, extent_ids: Iterable[int]) -> None:
        """Begin no copy in these extents from now on, and give them back when those under way have ended:
        `take_released` returns them then. Retries what has failed."""
        revoked = set(extent_ids)
        with self._state:
            for extent in self._granted():
                if extent.extent_id in revoked:
                    extent.is_revoked = extent.is_awaited = True
            self._failure = None
            self._extents_changed()

    def registered_slots(self) -> list[tuple[int, int]]:
        """For each granted extent: how many of its slots are registered and may be used."""
        with self._state:
            covered = self._covered()
            return [
                (one.extent_id, 0 if one.is_revoked else max(0, min(covered, one.end_slot) - one.first_slot))
                for one in self._in_place
                if one.is_granted
            ]

    def take_released(self) -> list[int]:
        """The revoked extents with nothing mapped, registered or open any more, since the last call."""
        with self._state:
            released, self._released = self._released, []
            return released

    # -- the pinning thread ---------------------------------------------------------------------------------

    def _give_back_step(self) -> Callable[[], None] | None:
        covered = self._covered()
        for extent in self._all():  # a revoked extent with nothing registered
            if extent.is_revoked and (extent in self._arriving or covered <= extent.first_slot):
                return partial(self._retire, extent)
        return super()._give_back_step()

    def _retire(self, extent: MappedExtent) -> None:
        """Close an extent with nothing registered. Extents that wait for its slots come into their place."""
        extent.close()
        with self._state:
            for extents in (self._in_place, self._arriving):
                if extent in extents:
                    extents.remove(extent)
            if extent.is_awaited:
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

    def _forget_limits(self) -> None:
        """There are none: the memory is the service's."""

    def _commit(self, chunk: Chunk) -> None:
        assert isinstance(chunk, ExtentChunk)
        start, end = chunk.pages()
        if start < end:
            chunk.extent.map(start, end)
        self._resident_bytes += end - start

    def _decommit(self, chunk: Chunk) -> None:
        assert isinstance(chunk, ExtentChunk)
        start, end = chunk.pages()
        if start < end:
            chunk.extent.unmap(start, end)
        self._resident_bytes -= end - start

    def _address_of(self, chunk: Chunk) -> int:
        assert isinstance(chunk, ExtentChunk)
        return chunk.extent.address + chunk.offset

    def _close_memory(self) -> None:
        for extent in self._all():
            extent.close()
        self._in_place, self._arriving = [], []

    # -- under `_state` -------------------------------------------------------------------------------------

    def _chunks_left(self) -> int:
        covered = self._covered()
        slots = sum(max(0, one.end_slot - max(covered, one.first_slot)) for one in self._granted())
        return -(-slots * self._stride // self._pace.chunk_bytes)

    def _usable(self) -> int:
        return self._usable_end

    def _wanted(self) -> int:
        return self._kept_end

    def _all(self) -> list[MappedExtent]:
        return [*self._in_place, *self._arriving]

    def _granted(self) -> list[MappedExtent]:
        return [extent for extent in self._all() if extent.may_be_used]

    def _place(self, extent: MappedExtent) -> None:
        """Put it in place, or let it arrive while others, which are revoked, have some of its slots. Raises
        `ConflictError` if one of those was granted in this session."""
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
        self._usable_end = end
        self._kept_end = min((one.first_slot for one in self._in_place if one.is_revoked), default=_MAX_SLOTS)
        self._table = _AddressTable(self._in_place, self._stride)
        if self._kept_end < self._queue_end:
            self._stop_growth()
        self._state.notify_all()
