"""The blocks that go to a tier's store, and when."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0


class PutQueue:
    """Every block that is stored in the pool waits here to be put, the oldest first. Not locked, except that
    `note_stored` may be called from any thread.

    The queue is bounded: the oldest block is dropped for a new one. While the store is full, blocks are dropped, for
    1 s at first and 30 s at most.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        """`most`: blocks that wait."""
        self._most, self._clock = most, clock
        self._noted: deque[Sequence[bytes]] = deque()
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._pause = 0.0
        self._paused_until = 0.0
        self.dropped = 0
        """Blocks that were not put because too many waited, or the store was full."""

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        """Whether anything waits to be put."""
        return bool(self._queue or self._noted)

    def note_stored(self, keys: Sequence[bytes]) -> None:
        """These blocks have just become visible in the pool."""
        self._noted.append(keys)

    def note_full(self) -> None:
        """The store had no room: drop what waits, and wait longer each time."""
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause or _FIRST_PAUSE)
        self._paused_until = self._clock() + self._pause
        self._drop_all()

    def note_put(self) -> None:
        """The store has taken what it was given."""
        self._pause = 0.0

    def take(self, count: int) -> list[bytes]:
        """Up to `count` blocks to put now."""
        self.sort_out()
        if self._clock() < self._paused_until:
            self._drop_all()
        return [self._queue.popitem(last=False)[0] for _ in range(min(count, len(self._queue)))]

    def put_back(self, keys: Sequence[bytes]) -> None:
        """These blocks were taken, and cannot be put yet."""
        self._queue.update(dict.fromkeys(keys))
        while len(self._queue) > self._most:
            self._queue.popitem(last=False)
            self.dropped += 1

    def sort_out(self) -> None:
        """Queue what was noted, within the bounds of the queue. Call it in each step in which nothing is taken."""
        while self._noted:
            self.put_back(self._noted.popleft())

    def _drop_all(self) -> None:
        self.dropped += len(self._queue)
        self._queue.clear()
