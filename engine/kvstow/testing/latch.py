"""A fence that a test opens: ordering is tested, not slept for."""

from __future__ import annotations

import threading


class Latch:
    """A `Fence` that is not reached before `open()`. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_open = False
        self._queries = 0

    def query(self) -> bool:
        with self._condition:
            self._queries += 1
            self._condition.notify_all()
            return self._is_open

    def open(self) -> None:
        with self._condition:
            self._is_open = True

    def wait_queried(self, times: int = 1, timeout: float = 10.0) -> bool:
        """Wait until `query` was called `times` more times: by then whoever asks has met the closed fence."""
        with self._condition:
            wanted = self._queries + times
            return self._condition.wait_for(lambda: self._queries >= wanted, timeout)
