"""Copies between ranges of host memory, on several threads: one reaches a tenth of a fast link, or a fifth where glibc
writes past the cache (see docs/copying.md)."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import NamedTuple

PAST_CACHE_BYTES = 1 << 20
"""Copies of this size and more are worth writing past the cache: nothing reads the bytes soon."""

_SHARE_BYTES = 1 << 20  # less is copied sooner than another thread wakes up
_LOADER = "/lib64/ld-linux-x86-64.so.2"


class Range(NamedTuple):
    """Addresses, and the length in bytes."""

    target: int
    source: int
    num_bytes: int


class CopyJob:
    """Ranges that are being copied."""

    def __init__(self, shares: Sequence[Future[None]] = ()) -> None:
        self._shares = shares

    @property
    def has_ended(self) -> bool:
        """Whether no thread uses the memory any more."""
        return all(share.done() for share in self._shares)

    def result(self) -> None:
        """Wait for the end. Raises what a copy has raised."""
        wait(self._shares)
        for share in self._shares:
            share.result()


class RangeCopier:
    """Owns its threads. A thread that has done its share of a job begins with the next job."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "kvstow-memcpy")

    def start(self, ranges: Sequence[Range]) -> CopyJob:
        """Begin to copy all ranges; few bytes are copied at once. The caller guarantees that the memory stays until the
        job has ended, and that targets are disjoint."""
        num_bytes = sum(one.num_bytes for one in ranges)
        if num_bytes <= _SHARE_BYTES:
            _copy(ranges)
            return CopyJob()
        shares = max(1, min(self._num_threads, num_bytes // _SHARE_BYTES, len(ranges)))
        bounds = [share * len(ranges) // shares for share in range(shares + 1)]
        return CopyJob([self._threads.submit(_copy, ranges[start:end]) for start, end in pairwise(bounds)])

    def close(self) -> None:
        """Wait for all jobs."""
        self._threads.shutdown()


def cached_copy_bytes() -> int | None:
    """The size up to which glibc copies through the CPU's cache in processes started with this environment; None where
    that is unknown: on other processors, with other C libraries, and with glibc before 2.33."""
    command = [_LOADER, "--list-tunables"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"x86_non_temporal_threshold: 0x([0-9a-f]+)", told)
    return int(found[1], 16) if found else None


def _copy(ranges: Sequence[Range]) -> None:
    for target, source, num_bytes in ranges:
        ctypes.memmove(target, source, num_bytes)  # it releases the interpreter
