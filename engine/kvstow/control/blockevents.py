"""Events of stored and removed blocks, for cache-aware routers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Literal, NamedTuple

from kvstow.control.descriptions import Descriptions

MAX_EVENT_KEYS = 1024
"""How many keys one event has at most. A larger batch becomes several events."""


class BlockEvent(NamedTuple):
    """Blocks that became visible or were removed. `reason`: why they were removed; empty if they were stored.
    `namespace`: the number of their namespace, see `Namespace.tag`. A number is used again only when its namespace is
    empty."""

    sequence: int
    kind: Literal["stored", "removed"]
    keys: tuple[bytes, ...]
    reason: str
    namespace: int = 0


class BlockEventPage(NamedTuple):
    """Events after a cursor. `lost`: how many events between the cursor and the first one are no longer kept."""

    events: list[BlockEvent]
    cursor: int
    lost: int


class BlockEventLog:
    """The last events, numbered from 1 without gaps. Any thread may write and read; each call is O(keys or events
    given).

    Keeps up to `buffer` events with up to `buffer` keys, or two keys for each slot of the pool if that is more: enough
    to fill the pool and to empty it. A reader that missed more should look blocks up instead. `num_slots` returns the
    size of the pool; `append` calls it.

    Each reader keeps its own cursor. A page says how many events a slow reader has missed.
    """

    def __init__(self, buffer: int, num_slots: Callable[[], int]) -> None:
        self._buffer, self._num_slots = buffer, num_slots
        self._events: deque[BlockEvent] = deque()
        self._num_keys = 0
        self._sequence = 0
        self._lock = Lock()
        self.descriptions = Descriptions()
        """The descriptions that go with the events. Unlike the log itself, they are used with the pool's lock held."""

    @property
    def last_sequence(self) -> int:
        return self._sequence

    @property
    def num_keys(self) -> int:
        """How many keys the kept events have."""
        return self._num_keys

    def append(
        self, kind: Literal["stored", "removed"], keys: tuple[bytes, ...], reason: str = "", namespace: int = 0
    ) -> None:
        num_keys = len(keys)
        if not num_keys:
            return
        batches = (keys,) if num_keys <= MAX_EVENT_KEYS else _batches(keys)
        events, buffer = self._events, self._buffer
        with self._lock:
            for batch in batches:
                self._sequence += 1
                events.append(BlockEvent(self._sequence, kind, batch, reason, namespace))
            self._num_keys += num_keys
            if self._num_keys > buffer or len(events) > buffer:
                self._forget(2 * num_keys)

    def _forget(self, budget: int) -> None:
        """Drop the oldest excess events, with up to `budget` keys. `append` passes twice the number of keys that it
        adds, so that the log catches up after a shrink of the pool, and no single call pays for all of it."""
        events, buffer = self._events, self._buffer
        max_keys = max(buffer, 2 * self._num_slots()) if self._num_keys > buffer else buffer
        while budget > 0 and (len(events) > buffer or self._num_keys > max_keys):
            num_keys = len(events.popleft().keys)
            self._num_keys -= num_keys
            budget -= num_keys

    def read(self, after: int, limit: int = 1000) -> BlockEventPage:
        """Return up to `limit` events with numbers above `after`, the oldest first. Pass the page's `cursor` as the
        next `after`."""
        with self._lock:
            first = self._sequence - len(self._events) + 1
            lost = max(0, first - after - 1)
            start = max(0, after + 1 - first)
            end = min(start + limit, len(self._events))
            events = [self._events[at] for at in range(start, end)]  # a deque indexes from the nearer end
        return BlockEventPage(events, events[-1].sequence if events else max(after, first - 1), lost)


def _batches(keys: tuple[bytes, ...]) -> list[tuple[bytes, ...]]:
    return [keys[start : start + MAX_EVENT_KEYS] for start in range(0, len(keys), MAX_EVENT_KEYS)]
