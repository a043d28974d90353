"""A bound on the bytes that ops hold outside the pool and the KV cache, and how the host's thread waits for copies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Event

_PATIENCE = 30.0  # seconds; a copy takes milliseconds
_POLL = 1e-4


class Held:
    """Bytes in flight; they are given back when it is dropped."""

    def __init__(self, num_bytes: int, returned: deque[int]) -> None:
        self._num_bytes, self._returned = num_bytes, returned

    def __del__(self) -> None:
        self._returned.append(self._num_bytes)  # without a lock: a finalizer may run in the middle of anything


class BytesInFlight:
    """Counts bytes up to `limit`; one piece larger than that may be in flight alone. Used by one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._returned: deque[int] = deque()

    def take(self, num_bytes: int) -> Held | None:
        """Count these bytes for as long as the result lives; None if that exceeds the limit."""
        while self._returned:
            self._taken -= self._returned.popleft()
        if self._taken and self._taken + num_bytes > self._limit:
            return None
        self._taken += num_bytes
        return Held(num_bytes, self._returned)


def wait_until(condition: Callable[[], bool], stopping: Event) -> bool:
    """Wait for what the copy thread does, and no longer than until `stopping` is set, or 30 seconds. False if it has
    not come true."""
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() >= deadline or stopping.wait(_POLL):
            return False
    return True
