"""Limits how much is written to a disk, so that it lasts, and counts how much was written."""

from __future__ import annotations

from array import array
from collections import deque

DAY_SECONDS = 86_400.0
_BUCKET_SECONDS = 3600.0
"""The bucket holds what may be written in this time."""
_ACTIVE_SECONDS = 3600.0
_STEP_SECONDS = 600.0

_NUM_NAMES = 1 << 20
"""How many uses are remembered, in 4 MiB."""


class WriteBudget:
    """A bucket that fills evenly, is empty at the start, and holds an hour's worth. Not locked.

    Each owner that wants to write has a bucket of its own, which gets an equal part of the rate. Bytes that do not fit
    into it may be used by all owners.
    """

    def __init__(self, bytes_per_day: int, now: float) -> None:
        self.bytes_per_day = bytes_per_day
        self._rate = bytes_per_day / DAY_SECONDS
        self._size = self._rate * _BUCKET_SECONDS
        self._level: dict[str, float] = {}
        self._asked_at: dict[str, float] = {}
        self._common = 0.0
        self._filled_at = now

    def allows(self, owner: str, num_bytes: int, *, was_used_again: bool, now: float) -> bool:
        """Whether a block of `num_bytes` may be written. While less than half of a full bucket is available, only
        blocks that were used more than once may be written."""
        self._fill(owner, now)
        available = self._level[owner] + self._common
        if available < num_bytes and available < self._size / len(self._level):
            return False
        return was_used_again or available >= self._size / len(self._level) / 2

    def spend(self, owner: str, num_bytes: int) -> None:
        """Take the bytes of a block that is written now. A block that is larger than a whole bucket leaves a debt."""
        own = min(num_bytes, max(0.0, self._level.get(owner, 0.0)))
        common = min(num_bytes - own, self._common)
        self._level[owner] = self._level.get(owner, 0.0) - (num_bytes - common)
        self._common -= common

    def _fill(self, owner: str, now: float) -> None:
        gained = max(0.0, now - self._filled_at) * self._rate
        self._filled_at = max(self._filled_at, now)
        self._asked_at[owner] = now
        for other in [one for one, at in self._asked_at.items() if now - at > _ACTIVE_SECONDS]:
            self._common += max(0.0, self._level.pop(other, 0.0))
            del self._asked_at[other]
        self._level.setdefault(owner, 0.0)
        count = len(self._level)
        for one, level in self._level.items():
            self._level[one] = min(level + gained / count, self._size / count)
            self._common += level + gained / count - self._level[one]
        self._common = min(self._common, self._size - sum(max(0.0, level) for level in self._level.values()))


class UsedNames:
    """Remembers which blocks that the disks lack were used before. If the names of two blocks have the same entry, the
    later one gets it. Not locked."""

    def __init__(self) -> None:
        self._entries = array("I", bytes(4 * _NUM_NAMES))

    def has(self, digest: bytes) -> bool:
        at, entry = self._find(digest)
        return self._entries[at] == entry

    def note(self, digest: bytes) -> bool:
        """Remember a use of this block. Returns whether an earlier use was remembered."""
        at, entry = self._find(digest)
        is_known = self._entries[at] == entry
        self._entries[at] = entry
        return is_known

    def _find(self, digest: bytes) -> tuple[int, int]:
        value = int.from_bytes(digest[:8], "little")
        return value % _NUM_NAMES, value >> 32 or 1


class WrittenBytes:
    """Counts the bytes that were written in the last day, in steps of ten minutes. Not locked."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._steps: deque[tuple[float, int]] = deque()
        self._total = 0

    def note(self, num_bytes: int, now: float) -> None:
        if self._steps and now - self._steps[-1][0] < _STEP_SECONDS:
            begun, before = self._steps.pop()
            self._steps.append((begun, before + num_bytes))
        else:
            self._steps.append((now, num_bytes))
        self._total += num_bytes

    def today(self, now: float) -> int:
        """Return how many bytes were written in the last day."""
        while self._steps and now - self._steps[0][0] >= DAY_SECONDS:
            self._total -= self._steps.popleft()[1]
        return self._total

    def per_day(self, now: float) -> float | None:
        """Return how many bytes a day are written at the pace of the last day; None during the first hour."""
        seconds = min(DAY_SECONDS, now - self._since)
        return None if seconds < _BUCKET_SECONDS else self.today(now) * DAY_SECONDS / seconds
