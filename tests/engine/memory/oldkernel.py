"""A C library over a kernel that lacks one kind of advice."""

from __future__ import annotations

import ctypes
import errno
from typing import Any

from kvstow.memory import region as region_module


class OldKernel:
    """Passes every call on, but for `madvise` with the advice that it does not know."""

    def __init__(self, unknown_advice: int) -> None:
        self.libc: Any = region_module.libc
        self._unknown = unknown_advice

    def __getattr__(self, name: str) -> object:
        return getattr(self.libc, name)

    def madvise(self, address: int, num_bytes: int, advice: int) -> int:
        if advice == self._unknown:
            ctypes.set_errno(errno.EINVAL)
            return -1
        return int(self.libc.madvise(address, num_bytes, advice))
