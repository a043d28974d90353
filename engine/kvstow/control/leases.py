"""Leases: slots that a host keeps from eviction between a look-up and its load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """Keys that were present, and their slots. Ends when it is released, or when a load uses it."""

    lease_id: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]


class LeaseBook:
    """The leases that have not ended. Not locked; O(1).

    `epoch` grows when a rank loses its memory: older leases are broken, though they still hold slots.
    """

    def __init__(self) -> None:
        self._epoch_of: dict[int, int] = {}
        self._last_id = 0
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._epoch_of)

    def grant(self, keys: tuple[bytes, ...], slots: tuple[int, ...]) -> Lease:
        self._last_id += 1
        self._epoch_of[self._last_id] = self.epoch
        return Lease(self._last_id, keys, slots)

    def is_open(self, lease: Lease) -> bool:
        return lease.lease_id in self._epoch_of

    def is_broken(self, lease: Lease) -> bool:
        return self._epoch_of.get(lease.lease_id) != self.epoch

    def end(self, lease: Lease) -> bool:
        """End the lease; False if it had ended before."""
        return self._epoch_of.pop(lease.lease_id, None) is not None
