"""Leases: slots that a host keeps from eviction between a lookup and its load."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from kvstow.results import Lease


class LeaseBook:
    """The leases of a session that have not ended, oldest first. Not locked; O(1).

    A broken lease cannot be used any more, though it still holds slots. `max_slots`: how many slots all leases together
    may hold when a store finds no other slot; the oldest ones end for it.
    """

    def __init__(self) -> None:
        self._open: dict[int, Lease] = {}
        self._last_id = 0
        self._last_broken_id = 0
        self.num_slots = 0
        self.max_slots: float = inf

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._open.values())

    def get(self, lease_id: int) -> Lease | None:
        """The lease with this id, unless it has ended."""
        return self._open.get(lease_id)

    def grant(self, keys: tuple[bytes, ...], slots: tuple[int, ...]) -> Lease:
        self._last_id += 1
        lease = self._open[self._last_id] = Lease(self._last_id, keys, slots)
        self.num_slots += len(slots)
        return lease

    def is_open(self, lease: Lease) -> bool:
        return self._open.get(lease.lease_id) is lease

    def is_broken(self, lease: Lease) -> bool:
        return lease.lease_id <= self._last_broken_id

    def break_all(self) -> None:
        """All leases that were granted until now are broken."""
        self._last_broken_id = self._last_id

    def end(self, lease: Lease) -> bool:
        """End the lease; False if it had ended before."""
        if not self.is_open(lease):
            return False
        del self._open[lease.lease_id]
        self.num_slots -= len(lease.slots)
        return True

    def is_consistent(self) -> bool:
        """Whether the count of slots is right. For integrity checks."""
        return self.num_slots == sum(len(lease.slots) for lease in self)

    @property
    def excess_slots(self) -> int:
        """How many slots the leases hold beyond `max_slots`; a slot counts once for each of its leases."""
        return int(max(0, self.num_slots - self.max_slots))

    def end_excess(self) -> list[Lease]:
        """End the oldest leases until the others hold at most `max_slots`; returns the ended ones."""
        ended: list[Lease] = []
        while self.num_slots > self.max_slots:
            ended.append(next(iter(self._open.values())))
            self.end(ended[-1])
        return ended
