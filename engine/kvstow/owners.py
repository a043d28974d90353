"""How much one owner (uid) may hold of a resource that cannot be taken back from it."""

from __future__ import annotations

from collections import Counter
from threading import Lock


def most_of(total: int, held_by_others: int) -> int:
    """How much one owner may hold: half of what the others leave. So some is always left for one more owner."""
    return max(0, total - held_by_others) // 2


class SharedLimit:
    """How much each owner holds of a resource that has `total` units. Thread-safe: it holds its lock for a moment, and
    takes no other lock meanwhile. O(1)."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._held: Counter[int] = Counter()
        self._sum = 0
        self._lock = Lock()

    def add(self, owner: int, count: int) -> None:
        """Note that the owner holds `count` units more, or fewer if it is negative."""
        with self._lock:
            self._held[owner] += count
            self._sum += count
            if not self._held[owner]:
                del self._held[owner]

    def held(self, owner: int) -> int:
        with self._lock:
            return self._held.get(owner, 0)

    def most(self, owner: int) -> int:
        """How much the owner may hold now."""
        with self._lock:
            return most_of(self.total, self._sum - self._held.get(owner, 0))

    def has_room(self, owner: int) -> bool:
        """Whether the owner may hold more."""
        with self._lock:
            held = self._held.get(owner, 0)
            return held < most_of(self.total, self._sum - held)

    def owners(self) -> dict[int, int]:
        """How much each owner holds."""
        with self._lock:
            return dict(self._held)


class Holding:
    """How much one holder, such as a session, has of a `SharedLimit`. The holder notes it now and then. Not
    thread-safe."""

    __slots__ = ("_limit", "_noted", "_owner")

    def __init__(self, limit: SharedLimit, owner: int) -> None:
        self._limit, self._owner, self._noted = limit, owner, 0

    def another(self) -> Holding:
        """The holding of another holder with the same owner."""
        return Holding(self._limit, self._owner)

    def note(self, count: int) -> None:
        """Note that the holder has `count` units now."""
        if count != self._noted:
            self._limit.add(self._owner, count - self._noted)
            self._noted = count

    @property
    def may_grow(self) -> bool:
        return self._limit.has_room(self._owner)
