"""A bound on the bytes that ops hold outside the pool and the KV cache."""

from __future__ import annotations

from collections import deque


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
