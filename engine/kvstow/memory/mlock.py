"""Pinning with `mlock`, for pools that only the CPU copies from."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from pathlib import Path

from kvstow.bytesize import format_size
from kvstow.config import PoolConfig
from kvstow.errors import PinError
from kvstow.memory.pinning import PopulateOnly, Registrar

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = _libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class MlockRegistrar:
    """Locks memory with `mlock`, as far as the process may. After the first refusal it locks no more: the memory is
    populated and usable, `mode` becomes "populate", and `notice` names the limit. One registrar per pool."""

    def __init__(self) -> None:
        self.locked_bytes = 0
        self.notice: str | None = None
        self._locked: set[int] = set()

    @property
    def mode(self) -> str:
        return "mlock" if self.notice is None else "populate"

    def prepare_thread(self) -> None:
        """Locks belong to the process, so there is nothing to do."""

    def register(self, address: int, num_bytes: int) -> None:
        if self.notice is not None:
            return
        self._locked.add(address)  # before the call, which a signal handler may interrupt
        if _libc.mlock(address, num_bytes) == 0:
            self.locked_bytes += num_bytes
            return
        code = ctypes.get_errno()
        self._locked.remove(address)
        _libc.munlock(address, num_bytes)  # it may have locked a part
        what = f"mlock of {format_size(num_bytes)} failed: {errno.errorcode.get(code, code)} ({os.strerror(code)})"
        if not _forbidden(code, num_bytes):
            raise PinError("memlock", what)
        self.notice = (
            f"{what}; RLIMIT_MEMLOCK is {format_size(_memlock_limit())} and CAP_IPC_LOCK is missing. "
            f"{format_size(self.locked_bytes)} are locked; the rest is populated, but the machine may swap it"
        )

    def unregister(self, address: int, num_bytes: int) -> None:
        if address not in self._locked:
            return
        if _libc.munlock(address, num_bytes) != 0:
            raise PinError("memlock", f"munlock of {format_size(num_bytes)} failed: {os.strerror(ctypes.get_errno())}")
        self._locked.remove(address)
        self.locked_bytes -= num_bytes


class HugetlbRegistrar(PopulateOnly):
    """For reserved huge pages: they are never swapped, so they need no lock and no limit applies."""

    mode = "hugetlb"

    def __init__(self) -> None:
        self.locked_bytes = 0

    def register(self, address: int, num_bytes: int) -> None:
        self.locked_bytes += num_bytes

    def unregister(self, address: int, num_bytes: int) -> None:
        self.locked_bytes -= num_bytes


def cpu_registrar(config: PoolConfig) -> Registrar:
    """The registrar for a pool that only the CPU copies from."""
    return HugetlbRegistrar() if config.huge_pages == "reserved" else MlockRegistrar()


def _forbidden(code: int, num_bytes: int) -> bool:
    """Whether `mlock` failed for lack of permission: EPERM at a limit of 0, ENOMEM above a limit. ENOMEM alone can have
    other causes."""
    limit = _memlock_limit()
    above_limit = limit != resource.RLIM_INFINITY and _locked_by_process() + num_bytes > limit
    return code == errno.EPERM or (code == errno.ENOMEM and above_limit)


def _memlock_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _locked_by_process() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmLck:")), 0)
