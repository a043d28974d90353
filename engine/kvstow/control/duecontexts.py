"""Knows when the next request of each context is near, so that its blocks can be read before that request comes."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

MOST_DUE = 8192
"""The limit for contexts that wait for a later check. Beyond it, further ones are not added."""
MOST_PREFETCHES = 64
"""The limit for contexts whose blocks are to be read now. When it is reached, adding one drops the oldest."""


class DueContexts:
    """The contexts whose blocks are to be read now, and the times at which to check again whether the next requests of
    other contexts are near. Bounded. Not locked."""

    def __init__(self) -> None:
        self._due_at: dict[bytes, float] = {}
        self._heap: list[tuple[float, bytes]] = []
        """The same times as a heap, with additional entries that are outdated."""
        self._now: deque[bytes] = deque(maxlen=MOST_PREFETCHES)

    def __len__(self) -> int:
        """How many contexts have blocks that are to be read now."""
        return len(self._now)

    @property
    def next_at(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def add_now(self, context: bytes) -> None:
        self._now.append(context)

    def take_now(self) -> bytes:
        """Remove and return the next context whose blocks are to be read now. There must be one."""
        return self._now.popleft()

    def add_later(self, context: bytes, at: float) -> None:
        if len(self._due_at) >= MOST_DUE:
            return
        self._due_at[context] = at
        heappush(self._heap, (at, context))
        if len(self._heap) > 2 * len(self._due_at) + 64:
            self._heap = sorted((at, one) for one, at in self._due_at.items())

    def forget(self, context: bytes) -> None:
        """Forget when to check this context again, because it has been used meanwhile."""
        self._due_at.pop(context, None)

    def take_due(self, now: float) -> list[bytes]:
        """Remove and return the contexts that are to be checked again."""
        due: list[bytes] = []
        while self._heap and self._heap[0][0] <= now:
            at, context = heappop(self._heap)
            if self._due_at.get(context) == at:
                del self._due_at[context]
                due.append(context)
        return due

    def clear(self) -> None:
        self._due_at, self._heap = {}, []
        self._now.clear()
