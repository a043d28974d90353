"""Copies between ranges of host memory, on a few threads: one reaches a third of a fast link."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

_SHARE_BYTES = 1 << 20  # less is copied sooner than another thread wakes up


class Range(NamedTuple):
    """Addresses, and the length in bytes."""

    target: int
    source: int
    num_bytes: int


class RangeCopier:
    """Owns its threads. Used by one thread at a time."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads` includes the caller's."""
        self._num_threads = num_threads
        self._helpers = ThreadPoolExecutor(num_threads - 1, "kvstow-memcpy") if num_threads > 1 else None

    def copy(self, ranges: Sequence[Range]) -> None:
        """Copy all ranges and return. The caller guarantees that the memory is there, and that targets are disjoint."""
        num_bytes = sum(one.num_bytes for one in ranges)
        shares = max(1, min(self._num_threads, num_bytes // _SHARE_BYTES, len(ranges)))
        parts = [ranges[share * len(ranges) // shares : (share + 1) * len(ranges) // shares] for share in range(shares)]
        jobs = [self._helpers.submit(_copy, part) for part in parts[1:]] if self._helpers is not None else []
        try:
            _copy(parts[0])
        finally:
            for job in jobs:
                job.result()

    def close(self) -> None:
        if self._helpers is not None:
            self._helpers.shutdown()


def _copy(ranges: Sequence[Range]) -> None:
    for target, source, num_bytes in ranges:
        ctypes.memmove(target, source, num_bytes)  # it releases the interpreter
