"""One rank's pool in memory of the node service, mapped and registered in the background."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from kvstow.errors import InvalidRequestError
from kvstow.memory.chunks import Chunk, ChunkGrid
from kvstow.memory.extentmapping import ExtentMapping
from kvstow.memory.hoststeps import HostSteps
from kvstow.memory.mappedextent import ExtentMemory, ExtentPlace, MappedExtent
from kvstow.memory.pace import LATENCY_TARGET, AdaptivePace, Pace
from kvstow.memory.pinning import Registrar
from kvstow.memory.rankextents import RankExtents
from kvstow.memory.slotpool import Int64Array, SlotPool

_MAX_SLOTS = 1 << 32  # slots are 32-bit numbers on the wire


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
