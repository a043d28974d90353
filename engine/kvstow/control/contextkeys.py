"""What contexts have used, and when the next request of each is near: for reads before that request comes."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from heapq import heappop, heappush
from threading import Lock

MOST_KEPT_BYTES, MOST_KEPT_CONTEXTS = 32 << 20, 8192
"""Of the keys of the latest contexts of a namespace."""
MOST_PREFETCHES = 64
"""That wait."""


class ContextKeys:
    """What the last request of each context has used, so that it can be read again. Bounded. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        """By context: the keys in one piece, and their width."""
        self._num_bytes = 0

    def note(self, context: bytes, chain: Sequence[bytes], *, release: bool) -> bool:
        """A request of the context has used this chain of keys. Whether it is kept."""
        with self._lock:
            self._forget(context)
            width = len(chain[0]) if chain else 0
            if release or not chain or any(len(key) != width for key in chain):
                return False
            self._kept[context] = b"".join(chain), width
            self._num_bytes += len(chain) * width
            while self._num_bytes > MOST_KEPT_BYTES or len(self._kept) > MOST_KEPT_CONTEXTS:
                self._forget(next(iter(self._kept)))
            return True

    def of(self, context: bytes) -> list[bytes]:
        """Root first; empty if nothing is known."""
        with self._lock:
            data, width = self._kept.get(context, (b"", 1))
        return [data[at : at + width] for at in range(0, len(data), width)]

    def _forget(self, context: bytes) -> None:
        data, _ = self._kept.pop(context, (b"", 1))
        self._num_bytes -= len(data)


class DueContexts:
    """When to look again whether the next request of a context is near, and the contexts whose blocks are to be read
    now. Bounded. Not locked."""

    def __init__(self) -> None:
        self._due_at: dict[bytes, float] = {}
        self._heap: list[tuple[float, bytes]] = []
        """The same, with entries that are outdated."""
        self._now: deque[bytes] = deque(maxlen=MOST_PREFETCHES)

    def __len__(self) -> int:
        """The contexts whose blocks are to be read now."""
        return len(self._now)

    @property
    def next_at(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def add_now(self, context: bytes) -> None:
        self._now.append(context)

    def take_now(self) -> bytes:
        """The next of them; there must be one."""
        return self._now.popleft()

    def add_later(self, context: bytes, at: float) -> None:
        if len(self._due_at) >= MOST_KEPT_CONTEXTS:
            return
        self._due_at[context] = at
        heappush(self._heap, (at, context))
        if len(self._heap) > 2 * len(self._due_at) + 64:
            self._heap = sorted((at, one) for one, at in self._due_at.items())

    def forget(self, context: bytes) -> None:
        """It has been used again: what is known of its next request is outdated."""
        self._due_at.pop(context, None)

    def take_due(self, now: float) -> list[bytes]:
        """The contexts at which to look again."""
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
