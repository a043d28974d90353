"""Which blocks go to a tier's store, and when."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Literal, get_args

from kvstow.tier.autowrite import AutoWrite
from kvstow.tier.putpace import PutPace

WriteMode = Literal["auto", "through", "selective", "back"]
WRITE_MODES: tuple[WriteMode, ...] = get_args(WriteMode)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0


class WritePolicy:
    """The blocks that wait to be put, oldest first. Not locked, except that `note_stored` and `note_used` may be called
    from any thread.

    `through`: every block, when it is stored. `selective`: a block from its second use on, whether it was found or
    computed again. `back`: a block that is about to be evicted, which the owner of the pool has to find. `auto`:
    `through` where the store is large enough for that, else `selective`.

    The queue is bounded: the oldest block is dropped for a new one. While a store is full, blocks are dropped, for 1 s
    at first and 30 s at most.
    """

    def __init__(
        self,
        mode: WriteMode,
        max_queued: int,
        max_seen: int,
        clock: Callable[[], float],
        *,
        auto: AutoWrite | None = None,
        pace: PutPace | None = None,
    ) -> None:
        """`max_queued`: blocks that wait. `max_seen`: blocks whose uses are remembered, for `selective`. `auto`: who
        decides with the mode `auto`. `pace`: None for no limit."""
        self._auto = (auto or AutoWrite(None, 1, clock)) if mode == "auto" else None
        self.mode: WriteMode = mode if self._auto is None else self._auto.mode
        """Never `auto`."""
        self._pace = pace or PutPace(inf, clock)
        self._max_queued, self._max_seen, self._clock = max_queued, max_seen, clock
        self._noted: deque[tuple[bool, Sequence[bytes]]] = deque()
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        self._pause = 0.0
        self._paused_until = 0.0
        self.dropped = 0
        """Blocks that were not put because too many waited, or the store was full."""

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def decision(self) -> str:
        """Why blocks are put as they are, in words."""
        return f"{self.mode}, as it was set" if self._auto is None else self._auto.reason

    @property
    def has_work(self) -> bool:
        """Whether anything waits to be put, or may have to be."""
        return bool(self._queue or self._noted)

    def note_stored(self, keys: Sequence[bytes]) -> None:
        """These blocks have just become visible in the pool."""
        if self.mode != "back":
            self._noted.append((True, keys))

    def note_used(self, keys: Sequence[bytes]) -> None:
        """A request has found these blocks in the pool."""
        if self.mode == "selective" and keys:
            self._noted.append((False, keys))

    def note_full(self) -> None:
        """The store had no room: drop what waits, and wait longer each time."""
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause or _FIRST_PAUSE)
        self._paused_until = self._clock() + self._pause
        self.dropped += len(self._queue)
        self._queue.clear()

    def note_put(self) -> None:
        """The store has taken what it was given."""
        self._pause = 0.0

    def allowed(self, count: int) -> int:
        """How many of `count` blocks the store may be given now."""
        return 0 if self._clock() < self._paused_until else int(min(count, self._pace.allowed))

    def note_taken(self, count: int) -> None:
        """So many blocks, which were allowed, are put now. `take` does this by itself."""
        self._pace.spend(count)

    def take(self, count: int) -> list[bytes]:
        """Up to `count` blocks to put now."""
        self.sort_out()
        if self._clock() < self._paused_until:
            self.dropped += len(self._queue)
            self._queue.clear()
            return []
        count = self.allowed(min(count, len(self._queue)))
        self.note_taken(count)
        return [self._queue.popitem(last=False)[0] for _ in range(count)]

    def put_back(self, keys: Sequence[bytes]) -> None:
        """These blocks were taken, and cannot be put yet."""
        self._enqueue(keys)

    def sort_out(self) -> None:
        """Queue what was noted, within the bounds of the queue. Call it in each step in which nothing is taken."""
        if self._auto is not None:
            self._auto.note_new(0)
            self.mode = self._auto.mode
        while self._noted:
            is_store, keys = self._noted.popleft()
            if is_store and self._auto is not None:
                self._auto.note_new(len(keys))
            if self.mode == "through" and is_store:
                self._enqueue(keys)
            elif self.mode == "selective":
                self._enqueue([key for key in keys if self._use(key) == 2])

    def forget(self) -> None:
        """Nothing that was noted until now is to be put."""
        self._noted.clear()
        self._queue.clear()
        self._uses.clear()

    def _use(self, key: bytes) -> int:
        uses = self._uses[key] = self._uses.get(key, 0) + 1
        self._uses.move_to_end(key)
        if len(self._uses) > self._max_seen:
            self._uses.popitem(last=False)
        return uses

    def _enqueue(self, keys: Sequence[bytes]) -> None:
        self._queue.update(dict.fromkeys(keys))
        while len(self._queue) > self._max_queued:
            self._queue.popitem(last=False)
            self.dropped += 1
