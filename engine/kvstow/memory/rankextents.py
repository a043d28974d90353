"""The extents of one rank's pool: what the service grants and revokes, and which slots may be used by that."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from kvstow.errors import ConflictError
from kvstow.memory.mappedextent import ExtentPlace, MappedExtent
from kvstow.memory.slotpool import Int64Array


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
