"""Host memory as address space that is committed and given back piece by piece, near a device where one is preferred.

Long calls go through ctypes or numpy, which release the GIL: populating 64 MiB takes 10 ms, and serving must not wait
for that. Beside a host's steps one thread populates, at 5 GiB/s; with two, steps took 2 ms longer at the 99th
percentile. While the host is idle, eight threads reach 26 GiB/s (memory that the machine has used before).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

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
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_HUGEPAGE = 4, 10, 14
MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_COLLAPSE = 22, 23, 25
_MAP_FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
"""For calls that take long: they release the GIL."""
quick = ctypes.PyDLL(None, use_errno=True)
"""For calls of some microseconds, which keep the GIL: beside a thread that computes in Python, each call that releases
it waits 5 ms to get it back."""
_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
for _library in (libc, quick):
    _library.mmap.restype, _library.mmap.argtypes = _address, (_address, _size, _int, _int, _int, ctypes.c_long)
    _library.munmap.argtypes = _library.mlock.argtypes = _library.munlock.argtypes = (_address, _size)
    _library.madvise.argtypes = _library.mprotect.argtypes = (_address, _size, _int)


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
        libc.madvise(self.address, self.num_bytes, _MADV_DONTFORK)
        # Registering huge pages is 10 times cheaper. A kernel without them refuses, and the pool works all the same.
        # For reserved pages this changes nothing.
        libc.madvise(self.address, self.num_bytes, _MADV_HUGEPAGE)

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
            _check(quick.mprotect(address, num_bytes, _PROT_READ_WRITE), "mprotect", num_bytes)
            populate(address, num_bytes)
        except BaseException:
            self.decommit(offset, num_bytes)
            raise

    def decommit(self, offset: int, num_bytes: int) -> None:
        """Give the range's memory back; its bytes are lost."""
        address = self.address + offset
        _check(libc.madvise(address, num_bytes, _MADV_DONTNEED), "madvise(MADV_DONTNEED)", num_bytes)
        _check(quick.mprotect(address, num_bytes, _PROT_NONE), "mprotect", num_bytes)

    def map_file(self, offset: int, num_bytes: int, fd: int, start: int) -> None:
        """Map a file's bytes from `start` on in place of the reserved address space at `offset`. A child process does
        not inherit the mapping. Raises `PinError`."""
        address, flags = self.address + offset, _MAP_SHARED | _MAP_FIXED
        if quick.mmap(address, num_bytes, _PROT_READ_WRITE, flags, fd, start) != address:
            raise PinError("out_of_memory", f"mapping {format_size(num_bytes)} failed: {error_text()}")
        quick.madvise(address, num_bytes, _MADV_DONTFORK)

    def unmap_file(self, offset: int, num_bytes: int, library: ctypes.CDLL = libc) -> None:
        """Put reserved address space back where a file was mapped."""
        address, flags = self.address + offset, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        if library.mmap(address, num_bytes, _PROT_NONE, flags, -1, 0) != address:
            raise PinError("out_of_memory", f"unmapping {format_size(num_bytes)} failed: {error_text()}")
        quick.madvise(address, num_bytes, _MADV_DONTFORK)

    def close(self) -> None:
        """Give back memory and address space; idempotent."""
        if not self._closed:
            self._closed = True
            libc.munmap(self.address, self.num_bytes)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _reserve_aligned(num_bytes: int, more_flags: int) -> int:
    """Reserve more than needed, then unmap what lies before and after the aligned part."""
    asked = num_bytes + HUGE_PAGE_BYTES
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | more_flags
    start = libc.mmap(None, asked, _PROT_NONE, flags, -1, 0)
    if start == _MAP_FAILED:
        raise PinError("out_of_memory", f"cannot reserve {format_size(asked)} of address space: {error_text()}")
    address = round_up(start, HUGE_PAGE_BYTES)
    if address > start:
        libc.munmap(start, address - start)
    if (rest := start + asked - address - num_bytes) > 0:
        libc.munmap(address + num_bytes, rest)
    return int(address)


def _require_giving_back(address: int, num_bytes: int) -> None:
    """Raise `PinError` and unmap the range if the kernel cannot take reserved huge pages back. An empty range is enough
    to find out."""
    if libc.madvise(address, num_bytes, _MADV_DONTNEED) != 0:
        what = error_text()
        libc.munmap(address, num_bytes)
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
            raise PinError("out_of_memory", f"populating of {format_size(num_bytes)} failed: {error_text()}")


def _populate_reserved(address: int, num_bytes: int) -> None:
    """As `_populate`, but never by touching: a missing reserved page would raise SIGBUS."""
    for _, size in _refused(address, num_bytes):
        is_short = ctypes.get_errno() == errno.EFAULT
        why = "the machine or the cgroup has no reserved 2 MiB page left" if is_short else error_text()
        raise PinError("hugepages", f"populating {format_size(size)} failed: {why}")


def _refused(address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Let the kernel populate the range piece by piece. Yields start and size of each piece that it refuses, with errno
    set."""
    for start in range(address, address + num_bytes, _POPULATE_BYTES):
        size = min(_POPULATE_BYTES, address + num_bytes - start)
        if libc.madvise(start, size, MADV_POPULATE_WRITE) != 0:
            yield start, size


def _check(result: int, what: str, num_bytes: int) -> None:
    if result != 0:
        raise PinError("out_of_memory", f"{what} of {format_size(num_bytes)} failed: {error_text()}")


def error_text() -> str:
    """The name and the text of the last error of `libc` or `quick`."""
    code = ctypes.get_errno()
    return f"{errno.errorcode.get(code, code)} ({os.strerror(code)})"


_MPOL_PREFERRED = 1  # other nodes serve when this one is full
_NODE_OF_PAGE = 1 | 2  # MPOL_F_NODE | MPOL_F_ADDR
_MBIND = {"x86_64": 237, "aarch64": 235}  # the C library has no functions for them
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_NODES = 1024  # the kernel's most; a mask may be larger than the machine
_WORD_BITS = 64
_NODE_STEP = 16 << 20  # bytes between two samples of the node: sampling holds the GIL


def prefer_node(address: int, num_bytes: int, node: int) -> str | None:
    """Prefer `node` for the range's future pages. Returns a sentence for people if the kernel refuses; the memory works
    all the same. `address` is a multiple of the page size."""
    number = _MBIND.get(os.uname().machine)
    if number is None:
        return _refusal(node, f"not supported on {os.uname().machine}")
    if not 0 <= node < _NODES:
        return _refusal(node, f"there are nodes 0 to {_NODES - 1}")
    mask = (ctypes.c_uint64 * (_NODES // _WORD_BITS))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    # The kernel subtracts one from the given number of bits.
    arguments = (ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_long(_MPOL_PREFERRED), mask)
    if quick.syscall(ctypes.c_long(number), *arguments, ctypes.c_ulong(_NODES + 1), ctypes.c_ulong(0)) == 0:
        return None
    return _refusal(node, f"mbind failed: {error_text()}")


def bytes_by_node(address: int, num_bytes: int, step: int = _NODE_STEP) -> Counter[int]:
    """Bytes of the populated range by node, from one page in every `step` bytes (2 us each; any page of a huge page
    shows its node). Empty if the kernel refuses, as in some containers."""
    found: Counter[int] = Counter()
    number = _GET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        return found
    node = ctypes.c_int()
    rest = ctypes.c_void_p(None), ctypes.c_ulong(0)
    for start in range(address, address + num_bytes, step):
        arguments = (ctypes.byref(node), *rest, ctypes.c_void_p(start), ctypes.c_ulong(_NODE_OF_PAGE))
        if quick.syscall(ctypes.c_long(number), *arguments) != 0:
            return Counter()
        found[node.value] += min(step, address + num_bytes - start)
    return found


def memory_nodes(path: Path = Path("/sys/devices/system/node/has_memory")) -> tuple[int | None, ...]:
    """The machine's nodes that have memory; (None,) where there is only one, or the kernel does not report them."""
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",")]
        nodes = tuple(node for part in parts for node in range(int(part[0]), int(part[-1]) + 1))
    except (OSError, ValueError):
        return (None,)
    return nodes if len(nodes) > 1 else (None,)


def _refusal(node: int, why: str) -> str:
    return f"the pool is not bound to NUMA node {node} of its device: {why}"
