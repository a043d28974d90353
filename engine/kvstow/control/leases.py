"""The leases of sessions, and the slots of ended leases and loads that are still to be freed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from threading import Lock

from kvstow.collector import unvisited
from kvstow.owners import Holding
from kvstow.results import Lease

SLOTS_OF_LEASE = 8
"""A lease or a load takes this many slots' worth of the process's memory, in addition to its slots."""
_LEASES_AT_ONCE = 256
"""How many leases are ended at once for a store that finds no other slot."""
_MANY = 256
"""A lease of this many slots or more is kept from the garbage collector."""


class LeaseBook:
    """The leases of a session that have not ended, oldest first. Not locked; O(1).

    A broken lease cannot be used any more, though it still holds slots. `max_slots`: how many slots all leases together
    may hold when a store finds no other slot. If they hold more, the oldest leases end.
    """

    def __init__(self) -> None:
        self._open: dict[int, Lease] = {}
        self._last_id = 0
        self._last_broken_id = self._last_cut_id = 0
        self._cut_from: float = inf
        """A lease granted before the last `break_from` is broken if it has a slot with at least this number."""
        self.num_slots = 0
        self.max_slots: float = inf

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._open.values())

    def get(self, lease_id: int) -> Lease | None:
        """Return the lease with this id, or None if it has ended."""
        return self._open.get(lease_id)

    def grant(self, slots: tuple[int, ...]) -> Lease:
        if len(slots) >= _MANY:
            unvisited(slots)  # the collector takes milliseconds for those of a call with 65,536 keys
        self._last_id += 1
        lease = self._open[self._last_id] = Lease(self._last_id, len(slots), slots)
        self.num_slots += len(slots)
        return lease

    def is_open(self, lease: Lease) -> bool:
        return self._open.get(lease.lease_id) is lease

    def is_broken(self, lease: Lease) -> bool:
        if lease.lease_id <= self._last_broken_id:
            return True
        return lease.lease_id <= self._last_cut_id and max(lease.slots, default=-1) >= self._cut_from

    def break_all(self) -> None:
        """Break all leases that were granted until now."""
        self._last_broken_id = self._last_id

    def break_from(self, low: int) -> None:
        """Break all leases that were granted until now and have slots from `low` on."""
        self._last_cut_id = self._last_id
        self._cut_from = min(low, self._cut_from) if self._open else low

    def end(self, lease: Lease) -> bool:
        """End the lease. Returns False if it had ended before."""
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
        """End the oldest leases until the others hold at most `max_slots`, but only a bounded number of leases at once.
        Returns the leases that it has ended."""
        ended: list[Lease] = []
        for lease in list(islice(self, _LEASES_AT_ONCE)) if self.num_slots > self.max_slots else ():
            if self.num_slots <= self.max_slots:
                break
            self.end(lease)
            ended.append(lease)
        return ended


class Debts:
    """The work that remains when sessions, leases and loads have ended: to free their slots, and to fail their ops. A
    session of a node's pool may have held 4 million slots, so only `slice_slots` of them are freed at once.

    Used with the pool's lock held, except `exist` and `pay`.
    """

    def __init__(self, lock: Lock, slice_slots: int, unhold: Callable[[Iterable[int]], None]) -> None:
        self._lock, self.slice_slots, self._unhold = lock, slice_slots, unhold
        self.slots: deque[Sequence[int]] = deque()
        """Slots of leases and loads that have ended."""
        self.num_slots = 0
        """How many slots `slots` has."""
        self.holding: Holding | None = None
        """How much these slots take of the limit for the leases of all pools. None if there is one pool."""
        self._endings: deque[Iterator[None]] = deque()
        """What is left to do for sessions that have ended, in steps, each with the lock held."""

    @property
    def exist(self) -> bool:
        """Whether there is anything for `pay` to do. The caller needs no lock."""
        return bool(self.slots or self._endings)

    def owe(self, leased: Iterable[tuple[int, ...]]) -> None:
        """Take the slots of leases and loads that have ended. A slice of the debts is freed now, and the rest by `pay`,
        so that no call holds the lock for long."""
        for slots in leased:
            self.slots.append(slots)
            self.num_slots += len(slots)
        self.free_slice()

    def end_in_steps(self, steps: Iterator[None]) -> None:
        """End a session: make the first of these steps at once, and leave the others to `pay`."""
        if next(steps, self) is not self:
            self._endings.append(steps)

    def pay(self) -> bool:
        """Make one more step. Returns False if no debts are left. The caller does not hold the lock."""
        with self._lock:
            if not self._endings:
                self.free_slice()
            elif next(self._endings[0], self) is self:
                self._endings.popleft()
            return self.exist

    def free_slice(self) -> None:
        left = self.slice_slots
        while self.slots and left > 0:
            slots = self.slots.popleft()
            self.num_slots -= len(slots)
            if len(slots) > left:
                rest = slots if isinstance(slots, list) else list(slots)  # the end of the prefix is freed first
                slots = rest[-left:]
                del rest[-left:]
                self.slots.appendleft(rest)
                self.num_slots += len(rest)
            self._unhold(slots)
            left -= max(1, len(slots))

    def note_held(self) -> None:
        """Count the debts towards the limit for the leases of all pools. O(1)."""
        if self.holding is not None:
            self.holding.note(self.num_slots + SLOTS_OF_LEASE * len(self.slots))

    def close_holding(self) -> None:
        """Count no debts any more, because the pool has ended."""
        if self.holding is not None:
            self.holding.note(0)
            self.holding = None
