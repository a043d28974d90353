"""What the worker of one rank has of its pool's memory, as it reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstow.attach.extentcalls import ExtentGrant, ExtentSlots
from kvstow.errors import InvalidRequestError


@dataclass(slots=True)
class _GrantedExtent:
    grant: ExtentGrant
    registered: int = 0
    revoked: bool = False

    @property
    def end(self) -> int:
        return self.grant.first_slot + self.grant.num_slots


class RankMemory:
    """The extents that a worker was sent and has not let go of. Used only by the attach server's thread. O(extents
    given), except `released`, which is O(all extents)."""

    def __init__(self) -> None:
        self._by_id: dict[int, _GrantedExtent] = {}
        self._by_number: dict[int, _GrantedExtent] = {}
        self._num_full = 0
        """How many leading extents have all their slots registered."""
        self.top_slot = 0
        """A slot number that is above all slots of all its extents."""
        self.applied = 0
        """The newest desired state above whose capacity the worker is known to have no memory."""

    def granted(self, grants: Iterable[ExtentGrant]) -> None:
        """Extents were sent to the worker."""
        for grant in grants:
            extent = self._by_id[grant.extent_id] = self._by_number[grant.number] = _GrantedExtent(grant)
            self.top_slot = max(self.top_slot, extent.end)

    def revoked(self, extent_ids: Iterable[int]) -> None:
        """The worker was asked to let go of these extents."""
        for extent_id in extent_ids:
            if extent_id in self._by_id:
                self._by_id[extent_id].revoked = True

    def registered(self, extents: Sequence[ExtentSlots]) -> None:
        """The worker can copy to and from so many slots of each extent. Raises `InvalidRequestError`, and changes
        nothing, for extents that it does not have, or that have fewer slots."""
        for extent_id, num_slots in extents:
            if num_slots > self._find(extent_id).grant.num_slots:
                raise InvalidRequestError(
                    f"{num_slots} slots of extent {extent_id} are registered; "
                    f"allowed: its {self._find(extent_id).grant.num_slots} slots at most"
                )
        for extent_id, num_slots in extents:
            extent = self._find(extent_id)
            extent.registered = num_slots
            if num_slots < extent.grant.num_slots:
                self._num_full = min(self._num_full, extent.grant.number)
        while (following := self._by_number.get(self._num_full)) and following.registered == following.grant.num_slots:
            self._num_full += 1

    def released(self, extent_ids: Sequence[int]) -> None:
        """The worker has let go of these extents. Raises `InvalidRequestError`, and changes nothing, for extents that
        it was not asked to let go of."""
        for extent_id in extent_ids:
            if not self._find(extent_id).revoked:
                raise InvalidRequestError(
                    f"extent {extent_id} was not revoked: a worker keeps what it was sent until then"
                )
        for extent_id in set(extent_ids):
            extent = self._by_id.pop(extent_id)
            number = extent.grant.number
            if self._by_number.get(number) is extent:
                del self._by_number[number]
                self._num_full = min(self._num_full, number)
        self.top_slot = max((extent.end for extent in self._by_id.values()), default=0)

    @property
    def registered_slots(self) -> int:
        """The number below which all slots are registered. O(1)."""
        extent = self._by_number.get(self._num_full)
        if extent is not None:
            return extent.grant.first_slot + extent.registered
        return self._by_number[self._num_full - 1].end if self._num_full else 0

    def _find(self, extent_id: int) -> _GrantedExtent:
        extent = self._by_id.get(extent_id)
        if extent is None:
            raise InvalidRequestError(f"extent {extent_id} is none that this worker was sent")
        return extent
