"""A C library over a kernel that refuses one kind of advice."""

from __future__ import annotations

import ctypes
import errno
from typing import Any

from kvstow.memory import region as region_module


class OldKernel:
    """Passes every call on, but for `madvise` with the advice that it does not know, or refuses with another `code`,
    after the `first` times. `asked`: each advice that was given."""

    def __init__(self, unknown_advice: int, code: int = errno.EINVAL, *, first: int = 0) -> None:
        self.libc: Any = region_module.libc
        self._unknown, self._code, self._first = unknown_advice, code, first
        self.asked: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.libc, name)

    def madvise(self, address: int, num_bytes: int, advice: int) -> int:
        self.asked.append(advice)
        if advice == self._unknown and self.asked.count(advice) > self._first:
            ctypes.set_errno(self._code)
            return -1
        return int(self.libc.madvise(address, num_bytes, advice))
