"""Host memory as address space that is committed and given back piece by piece.

Long calls go through ctypes or numpy, which release the GIL: populating 64 MiB takes 10 ms, and serving must not wait
for that. Beside a host's steps one thread populates, at 5 GiB/s; with two, steps took 2 ms longer at the 99th
percentile. While the host is idle, eight threads reach 26 GiB/s (memory that the machine has used before)."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from kvstow.bytesize import format_size
from kvstow.config import HugePages
from kvstow.errors import PinError

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
HUGE_PAGE_BYTES = 2 << 20
_TOUCH_BYTES = 8 << 20  # less is not worth another thread
_POPULATE_BYTES = 8 << 20  # per call, 1 ms or more: meanwhile an mmap of any thread waits

_PROT_NONE, _PROT_READ_WRITE = 0, 1 | 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_HUGETLB, _MAP_HUGE_2MB = 0x40000, 21 << 26
_MADV_DONTNEED, _MADV_REMOVE, _MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 4, 9, 10, 14, 23
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.mmap.restype, _libc.mmap.argtypes = _address, (_address, _size, _int, _int, _int, ctypes.c_long)
_libc.munmap.argtypes = (_address, _size)
_libc.madvise.argtypes = (_address, _size, _int)

# Takes 2 us and keeps the GIL: beside a computing host, a thread that releases it waits 5 ms to get it back.
_mprotect = ctypes.PyDLL(None, use_errno=True).mprotect
_mprotect.argtypes = (_address, _size, _int)


class HostRegion:
    """`num_bytes` of reserved address space, aligned to a huge page; a child process does not inherit it.

    Offsets and sizes given to `commit` and `decommit` are multiples of `page_bytes`. Not locked: one thread at
    a time. The owner calls `close`, and nothing may use the memory afterwards.
    """

    def __init__(self, num_bytes: int, huge_pages: HugePages = "advised") -> None:
        """Raises `PinError` if there is no address space, or reserved huge pages cannot be used here."""
        self._is_reserved = huge_pages == "reserved"
        self.page_bytes = HUGE_PAGE_BYTES if self._is_reserved else PAGE_BYTES
        self.num_bytes = round_up(num_bytes, self.page_bytes)
        self.address = _reserve_aligned(self.num_bytes, _MAP_HUGETLB | _MAP_HUGE_2MB if self._is_reserved else 0)
        if self._is_reserved:
            _require_giving_back(self.address, self.num_bytes)
        self._closed = False
        # A pool's memory must not double in a fork, nor its huge pages be split by copy-on-write.
        _libc.madvise(self.address, self.num_bytes, _MADV_DONTFORK)
        # Registering huge pages is 10 times cheaper. A kernel without them refuses, and the pool works all the same.
        # For reserved pages this changes nothing.
        _libc.madvise(self.address, self.num_bytes, _MADV_HUGEPAGE)

    def commit(self, offset: int, num_bytes: int, *, plenty: bool = False, threads: int = 1) -> None:
        """Populate the range, with `threads` threads. Raises `PinError`; the range then holds no memory.

        `plenty`: no limit is near, so pages may be touched. That is faster and delays other threads less (an mmap waits
        1 ms at the 99th percentile, and 28 ms when the kernel populates: bench/README.md), but if memory runs out, the
        OOM killer ends the process.
        """
        address = self.address + offset
        touch = partial(_touch_by_threads, threads=threads)
        populate = _populate_reserved if self._is_reserved else touch if plenty else _populate
        try:
            _check(_mprotect(address, num_bytes, _PROT_READ_WRITE), "mprotect", num_bytes)
            populate(address, num_bytes)
        except BaseException:
            self.decommit(offset, num_bytes)
            raise

    def decommit(self, offset: int, num_bytes: int) -> None:
        """Give the range's memory back; its bytes are lost."""
        address = self.address + offset
        _check(_libc.madvise(address, num_bytes, _MADV_DONTNEED), "madvise(MADV_DONTNEED)", num_bytes)
        _check(_mprotect(address, num_bytes, _PROT_NONE), "mprotect", num_bytes)

    def close(self) -> None:
        """Give back memory and address space; idempotent."""
        if not self._closed:
            self._closed = True
            _libc.munmap(self.address, self.num_bytes)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _reserve_aligned(num_bytes: int, more_flags: int) -> int:
    """Reserve more than needed, then unmap what lies before and after the aligned part."""
    asked = num_bytes + HUGE_PAGE_BYTES
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | more_flags
    start = _libc.mmap(None, asked, _PROT_NONE, flags, -1, 0)
    if start == _MAP_FAILED:
        raise PinError("out_of_memory", f"cannot reserve {format_size(asked)} of address space: {_error_text()}")
    address = round_up(start, HUGE_PAGE_BYTES)
    if address > start:
        _libc.munmap(start, address - start)
    if (rest := start + asked - address - num_bytes) > 0:
        _libc.munmap(address + num_bytes, rest)
    return int(address)


def _require_giving_back(address: int, num_bytes: int) -> None:
    """Raise `PinError` and unmap the range if the kernel cannot take reserved huge pages back. An empty range is enough
    to find out."""
    if _libc.madvise(address, num_bytes, _MADV_DONTNEED) != 0:
        what = _error_text()
        _libc.munmap(address, num_bytes)
        raise PinError("hugepages", f"a pool in reserved huge pages needs Linux 5.18: MADV_DONTNEED failed with {what}")


def _touch(address: int, num_bytes: int) -> None:
    """Write to every page. A fault locks its own mapping (from Linux 6.4 on), populating the whole address space.

    numpy releases the GIL from 500 elements (2 MiB) on: a series of smaller pieces held it and made vLLM's eager steps
    four times as long.
    """
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
    memory[::PAGE_BYTES] = 0


def _touch_by_threads(address: int, num_bytes: int, *, threads: int) -> None:
    piece = max(round_up(-(-num_bytes // threads), HUGE_PAGE_BYTES), _TOUCH_BYTES)
    if num_bytes <= piece:
        _touch(address, num_bytes)
        return
    starts = range(address, address + num_bytes, piece)
    with ThreadPoolExecutor(len(starts), thread_name_prefix="kvstow-touch") as pool:
        list(pool.map(lambda start: _touch(start, min(piece, address + num_bytes - start)), starts))


def _populate(address: int, num_bytes: int) -> None:
    """Let the kernel fault in every page, so that no later access can fail or wait."""
    for start, size in _refused(address, num_bytes):
        if ctypes.get_errno() == errno.EINVAL:  # a kernel before 5.14
            _touch(start, size)
        else:
            raise PinError("out_of_memory", f"populating of {format_size(num_bytes)} failed: {_error_text()}")


def _populate_reserved(address: int, num_bytes: int) -> None:
    """As `_populate`, but never by touching: a missing reserved page would raise SIGBUS."""
    for _, size in _refused(address, num_bytes):
        is_short = ctypes.get_errno() == errno.EFAULT
        why = "the machine or the cgroup has no reserved 2 MiB page left" if is_short else _error_text()
        raise PinError("hugepages", f"populating {format_size(size)} failed: {why}")


def _refused(address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Let the kernel populate the range piece by piece. Yields start and size of each piece that it refuses, with errno
    set."""
    for start in range(address, address + num_bytes, _POPULATE_BYTES):
        size = min(_POPULATE_BYTES, address + num_bytes - start)
        if _libc.madvise(start, size, _MADV_POPULATE_WRITE) != 0:
            yield start, size


def _check(result: int, what: str, num_bytes: int) -> None:
    if result != 0:
        raise PinError("out_of_memory", f"{what} of {format_size(num_bytes)} failed: {_error_text()}")


def _error_text() -> str:
    code = ctypes.get_errno()
    return f"{errno.errorcode.get(code, code)} ({os.strerror(code)})"
