"""One rank's pool in memory of the node service, mapped and registered in the background."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from kvstow.errors import ConflictError, InvalidRequestError
from kvstow.memory.chunks import Chunk, ChunkGrid
from kvstow.memory.hoststeps import HostSteps
from kvstow.memory.mappedextent import ExtentMapping, ExtentMemory, ExtentPlace, MappedExtent
from kvstow.memory.pinning import LATENCY_TARGET, AdaptivePace, Pace, Registrar
from kvstow.memory.slotpool import Int64Array, SlotPool


class RankExtents:
    """Extents, each with the slots that it has in the pool.

    Extents in place have slots of their own. An extent that is granted with slots of others, which are on their way
    out, arrives: it comes into its place when the last of them has been retired. An extent belongs to the session that
    granted it; those of earlier sessions are held until this one has granted all that there is.

    Owns the mappings of its extents. Not locked: the pool calls all but `addresses` under its lock, and `close` when
    its threads have ended.
    """

    def __init__(self, stride: int, max_slots: int) -> None:
        self.stride = stride
        """Bytes from one slot to the next."""
        self.usable_end = 0
        """All slots below are of granted extents, without a gap."""
        self.kept_end = max_slots
        """The first slot of a revoked extent."""
        self._max_slots = max_slots
        self._in_place: list[MappedExtent] = []
        """In the order of their slots."""
        self._arriving: list[MappedExtent] = []
        self._released: list[int] = []
        self._table = _AddressTable()

    def addresses(self, slots: Int64Array) -> Int64Array:
        """Where slots of extents in place begin. For any thread."""
        return self._table.addresses(slots)

    # -- what the service says ------------------------------------------------------------------------------

    def begin_session(self) -> None:
        """All extents are those of an earlier session from now on."""
        for extent in self._all():
            extent.is_granted = extent.is_awaited = False
        for extent in self._arriving:
            extent.is_revoked = True
        self._released.clear()
        self._update()

    def drop_earlier(self) -> None:
        """Revoke the extents of earlier sessions."""
        for extent in self._in_place:
            if not extent.is_granted:
                extent.is_revoked = True
        self._update()

    def set_stride(self, stride: int) -> None:
        """Raises `ConflictError` if extents have another one."""
        if stride != self.stride and self._all():
            raise ConflictError(f"slots are {stride} bytes apart, and were {self.stride} before")
        self.stride = stride

    def take_held(self, place: ExtentPlace, extent_id: int, populated_bytes: int) -> bool:
        """Grant the extent of an earlier session that is this very memory, with the same slots. False if there is
        none."""
        for extent in self._in_place:
            if extent.place == place and not extent.is_granted and not extent.is_revoked:
                extent.extent_id, extent.is_granted = extent_id, True
                extent.raise_populated(populated_bytes)
                self._update()
                return True
        return False

    def add(self, extent: MappedExtent) -> None:
        """Add a granted extent, and own its mapping. Extents of earlier sessions with some of its slots are revoked.
        Raises `ConflictError` if an extent of this session has some of them; then the caller still owns the mapping."""
        self._place(extent)
        self._update()

    def set_populated(self, extents: Iterable[tuple[int, int]]) -> None:
        """So many bytes of these extents have memory. A smaller number than before changes nothing."""
        known = {extent.extent_id: extent for extent in self._granted()}
        for extent_id, num_bytes in extents:
            if extent_id in known:
                extent = known[extent_id]
                extent.raise_populated(min(num_bytes, extent.place.num_bytes))

    def revoke(self, extent_ids: Collection[int]) -> None:
        for extent in self._granted():
            if extent.extent_id in extent_ids:
                extent.is_revoked = extent.is_awaited = True
        self._update()

    def usable_slots(self, covered: int) -> list[tuple[int, int]]:
        """By granted extent: how many of its slots may be used, if those below `covered` are registered."""
        return [
            (
                extent.extent_id,
                0 if extent.is_revoked else max(0, min(covered, extent.end_slot) - extent.first_slot),
            )
            for extent in self._in_place
            if extent.is_granted
        ]

    def take_released(self) -> list[int]:
        """The extents that the service waits for and that were retired since the last call."""
        released, self._released = self._released, []
        return released

    # -- what the pool does ---------------------------------------------------------------------------------

    def usable_at(self, slot: int) -> MappedExtent | None:
        """The extent in place that has the slot, if it may be used."""
        extent = next((one for one in self._in_place if one.first_slot <= slot < one.end_slot), None)
        return extent if extent is not None and extent.may_be_used else None

    def num_slots_from(self, covered: int) -> int:
        """How many slots from `covered` on granted extents have."""
        return sum(max(0, extent.end_slot - max(covered, extent.first_slot)) for extent in self._granted())

    def to_retire(self, covered: int) -> MappedExtent | None:
        """A revoked extent of which nothing is registered, if slots below `covered` are."""
        for extent in self._all():
            if extent.is_revoked and (extent in self._arriving or covered <= extent.first_slot):
                return extent
        return None

    def retire(self, extent: MappedExtent) -> None:
        """Forget the extent, whose mapping is closed. Extents that wait for its slots come into their place."""
        for extents in (self._in_place, self._arriving):
            if extent in extents:
                extents.remove(extent)
        if extent.is_awaited:
            self._released.append(extent.extent_id)
        arriving, self._arriving = self._arriving, []
        for other in arriving:
            self._place(other)
        self._update()

    def close(self) -> None:
        """Close all mappings; idempotent."""
        for extent in self._all():
            extent.mapping.close()
        self._in_place, self._arriving = [], []

    def _all(self) -> list[MappedExtent]:
        return [*self._in_place, *self._arriving]

    def _granted(self) -> list[MappedExtent]:
        return [extent for extent in self._all() if extent.may_be_used]

    def _place(self, extent: MappedExtent) -> None:
        """Put it in place, or let it arrive while others have some of its slots."""
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

    def _update(self) -> None:
        """Extents have come, gone, or changed."""
        end = 0
        for extent in self._in_place:
            if extent.first_slot != end or not extent.may_be_used:
                break
            end = extent.end_slot
        self.usable_end = end
        revoked = [extent.first_slot for extent in self._in_place if extent.is_revoked]
        self.kept_end = min(revoked, default=self._max_slots)
        self._table = _AddressTable(self._in_place, self.stride)


class _AddressTable:
    """Where the slots of extents lie. Immutable, so any thread may use it without a lock. O(log extents) for a slot."""

    def __init__(self, extents: Sequence[MappedExtent] = (), stride: int = 0) -> None:
        self._first = np.array([extent.first_slot for extent in extents], np.int64)
        self._address = np.array([extent.mapping.address for extent in extents], np.int64)
        self._stride = stride

    def addresses(self, slots: Int64Array) -> Int64Array:
        at = np.searchsorted(self._first, slots, side="right") - 1
        return self._address[at] + (slots - self._first[at]) * self._stride


_MAX_SLOTS = 1 << 32  # slots are 32-bit numbers on the wire


class Grant(Protocol):
    """What the service says of an extent; `kvstow.attach.calls.ExtentGrant` is one."""

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


class MappedPool(SlotPool):
    """Slots in extents that the node service has granted, as far as it has populated them.

    Each extent has address space of its own, aligned to 2 MiB, and its slots lie in it back to back. One range for all
    slots would put all extents but the first where the kernel cannot map huge pages, unless the size of a slot divides
    2 MiB. So `addresses` looks up the extent.

    Slots become usable from slot 0 on, without a gap. What the service grants and revokes decides, and not the target,
    which is for display: grants may come before the target that goes with them. Memory goes back when an extent is
    revoked, or not granted again in a new session. It goes before new memory is mapped, so there is never more than one
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
        self._extents = RankExtents(slot_bytes, self.max_slots)
        self._memory = ExtentMemory(self._paced, self._extents.close)

    @property
    def slot_stride(self) -> int:
        return self._extents.stride

    def addresses(self, slots: Int64Array) -> Int64Array:
        return self._extents.addresses(slots)

    # -- what the service says ------------------------------------------------------------------------------

    def begin_session(self) -> None:
        """The extents are those of an earlier session from now on: none of their slots is usable until they are granted
        again. No copy may be under way."""
        with self._state:
            self._extents.begin_session()
            self._stop_growth()
            self._extents_changed()

    def drop_earlier(self) -> None:
        """Give back the extents of earlier sessions: those that this session has too were granted again."""
        with self._state:
            self._extents.drop_earlier()
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
                self._extents.set_stride(slot_stride)
            for grant in grants:
                self._grant_one(grant, left.pop(0))
        finally:
            for fd in left:
                os.close(fd)

    def _grant_one(self, grant: Grant, fd: int) -> None:
        try:
            found = os.fstat(fd)
            place = ExtentPlace(found.st_dev, found.st_ino, grant.num_bytes, grant.first_slot, grant.num_slots)
            with self._state:
                is_held = self._extents.take_held(place, grant.extent_id, grant.populated_bytes)
                self._extents_changed()
            if is_held:
                os.close(fd)
                return
            grid = ChunkGrid.of_stride(self.slot_stride, grant.num_slots, self._pace.chunk_bytes)
            mapping = ExtentMapping(fd, grant.num_bytes)
        except BaseException:
            os.close(fd)
            raise
        extent = MappedExtent(grant.extent_id, place, grid, mapping)
        extent.raise_populated(grant.populated_bytes)
        with self._state:
            try:
                self._extents.add(extent)
            except BaseException:
                mapping.close()
                raise
            self._extents_changed()

    def set_populated(self, extents: Iterable[tuple[int, int]]) -> None:
        """So many bytes of these extents have memory. A smaller number than before changes nothing."""
        with self._state:
            self._extents.set_populated(extents)
            self._extents_changed()

    def revoke(self, extent_ids: Iterable[int]) -> None:
        """Begin no copy in these extents from now on, and give them back when those under way have ended:
        `take_released` tells. Retries what has failed."""
        with self._state:
            self._extents.revoke(set(extent_ids))
            self._failure = None
            self._extents_changed()

    def registered_slots(self) -> list[tuple[int, int]]:
        """By granted extent: how many of its slots are registered and may be used."""
        with self._state:
            return self._extents.usable_slots(self._covered())

    def take_released(self) -> list[int]:
        """The revoked extents of which nothing is mapped, registered or open any more, since the last call."""
        with self._state:
            return self._extents.take_released()

    # -- the pinning thread ---------------------------------------------------------------------------------

    def _give_back_step(self) -> Callable[[], None] | None:
        extent = self._extents.to_retire(self._covered())
        return super()._give_back_step() if extent is None else partial(self._retire, extent)

    def _retire(self, extent: MappedExtent) -> None:
        """Nothing of the extent is registered any more."""
        extent.mapping.close()
        with self._state:
            self._extents.retire(extent)
            self._extents_changed()

    def _next_chunk(self, covered: int) -> Chunk | None:
        extent = self._extents.usable_at(covered)
        return None if extent is None else extent.next_chunk(covered, self._pace.chunk_bytes)

    def _forget_limits(self) -> None:
        """There are none: the memory is the service's."""

    # -- under `_state` -------------------------------------------------------------------------------------

    def _chunks_left(self) -> int:
        return -(-self._extents.num_slots_from(self._covered()) * self.slot_stride // self._pace.chunk_bytes)

    def _usable(self) -> int:
        return self._extents.usable_end

    def _wanted(self) -> int:
        return self._extents.kept_end

    def _extents_changed(self) -> None:
        if self._extents.kept_end < self._queue_end:
            self._stop_growth()
        self._state.notify_all()
