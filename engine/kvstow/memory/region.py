"""Host memory: reserves address space, and commits it and gives it back piece by piece, near a device if one is given.

Long calls go through ctypes or numpy, which release the GIL: populating 64 MiB takes 10 ms, and serving must not wait
for that. While a host makes steps, one thread populates, at 5 GiB/s. With two threads, steps became 2 ms longer at the
99th percentile. While the host is idle, eight threads reach 26 GiB/s (in memory that the machine has used before).
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
"""The size of a huge page. Reserved huge pages of other sizes are not used."""
_TOUCH_BYTES = 8 << 20
"""A thread touches at least this many bytes. Fewer are not worth another thread."""
_POPULATE_BYTES = 8 << 20
"""How many bytes one call populates, in 1 ms or more. An mmap of any other thread waits until the call ends."""

_PROT_NONE, _PROT_READ_WRITE = 0, 1 | 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_HUGETLB, _MAP_HUGE_2MB = 0x40000, 21 << 26
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_HUGEPAGE = 4, 10, 14
MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_COLLAPSE = 22, 23, 25
_MAP_FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
"""The C library for long calls, which release the GIL."""
quick = ctypes.PyDLL(None, use_errno=True)
"""The C library for calls of some microseconds, which keep the GIL. A call that releases it waits 5 ms to get it back
if another thread computes in Python."""
_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
for _library in (libc, quick):
    _library.mmap.restype, _library.mmap.argtypes = _address, (_address, _size, _int, _int, _int, ctypes.c_long)
    _library.munmap.argtypes = _library.mlock.argtypes = _library.munlock.argtypes = (_address, _size)
    _library.madvise.argtypes = _library.mprotect.argtypes = (_address, _size, _int)

_MPOL_PREFERRED = 1
"""The policy that takes memory from other nodes when the preferred one is full."""
_NODE_OF_PAGE = 1 | 2
"""MPOL_F_NODE | MPOL_F_ADDR: ask for the node of the page at an address."""
_MBIND = {"x86_64": 237, "aarch64": 235}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
"""The numbers of the two system calls, for which the C library has no functions."""
_NODES = 1024
"""The largest number of nodes that the kernel supports. A mask of nodes may be larger than the machine."""
_WORD_BITS = 64
_NODE_STEP = 16 << 20
"""How many bytes lie between two samples of a page's node. Sampling holds the GIL, so few samples are taken."""


class HostRegion:
    """A range of `num_bytes` of reserved address space, aligned to a huge page. A child process does not inherit it.

    The offsets and sizes for `commit` and `decommit` are multiples of `page_bytes`. Not locked, so only one thread at a
    time may use it. The owner calls `close`, and nothing may use the memory afterwards.
    """

    def __init__(self, num_bytes: int, huge_pages: HugePages = "advised") -> None:
        """Raises `PinError` if there is no address space, or if this machine has no usable reserved huge pages."""
        self._is_reserved = huge_pages == "reserved"
        self.page_bytes = HUGE_PAGE_BYTES if self._is_reserved else PAGE_BYTES
        self.num_bytes = round_up(num_bytes, self.page_bytes)
        self.address = _reserve_aligned(self.num_bytes, _MAP_HUGETLB | _MAP_HUGE_2MB if self._is_reserved else 0)
        if self._is_reserved:
            _require_giving_back(self.address, self.num_bytes)
        self._closed = False
        # A fork must neither double the memory of a pool nor split its huge pages by copy-on-write.
        libc.madvise(self.address, self.num_bytes, _MADV_DONTFORK)
        # Registering huge pages is 10 times cheaper. A kernel without huge pages refuses, and the pool works without
        # them. For reserved pages this changes nothing.
        libc.madvise(self.address, self.num_bytes, _MADV_HUGEPAGE)

    def commit(self, offset: int, num_bytes: int, *, plenty: bool = False, threads: int = 1) -> None:
        """Populate the range with `threads` threads. If it raises `PinError`, the range holds no memory.

        With `plenty`, no limit is near, so the range is populated by touching its pages. That is faster and delays
        other threads less: an mmap waits 1 ms at the 99th percentile, instead of 28 ms while the kernel populates
        (bench/README.md). But if memory runs out, the OOM killer ends the process.
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
        """Give the range's memory back. Its bytes are lost."""
        address = self.address + offset
        _check(libc.madvise(address, num_bytes, _MADV_DONTNEED), "madvise(MADV_DONTNEED)", num_bytes)
        _check(quick.mprotect(address, num_bytes, _PROT_NONE), "mprotect", num_bytes)

    def map_file(self, offset: int, num_bytes: int, fd: int, start: int) -> None:
        """Map the bytes of a file from `start` on over the reserved address space at `offset`. A child process does not
        inherit the mapping. Raises `PinError`."""
        address, flags = self.address + offset, _MAP_SHARED | _MAP_FIXED
        if quick.mmap(address, num_bytes, _PROT_READ_WRITE, flags, fd, start) != address:
            raise PinError("out_of_memory", f"mapping {format_size(num_bytes)} failed: {error_text()}")
        quick.madvise(address, num_bytes, _MADV_DONTFORK)

    def unmap_file(self, offset: int, num_bytes: int, library: ctypes.CDLL = libc) -> None:
        """Replace the mapping of a file by reserved address space."""
        address, flags = self.address + offset, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        if library.mmap(address, num_bytes, _PROT_NONE, flags, -1, 0) != address:
            raise PinError("out_of_memory", f"unmapping {format_size(num_bytes)} failed: {error_text()}")
        quick.madvise(address, num_bytes, _MADV_DONTFORK)

    def close(self) -> None:
        """Give back the memory and the address space. Idempotent."""
        if not self._closed:
            self._closed = True
            libc.munmap(self.address, self.num_bytes)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _reserve_aligned(num_bytes: int, more_flags: int) -> int:
    """Reserve address space that begins at a huge page. It reserves a huge page more, and then unmaps what lies before
    and after the aligned part."""
    reserved = num_bytes + HUGE_PAGE_BYTES
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | more_flags
    start = libc.mmap(None, reserved, _PROT_NONE, flags, -1, 0)
    if start == _MAP_FAILED:
        raise PinError("out_of_memory", f"cannot reserve {format_size(reserved)} of address space: {error_text()}")
    address = round_up(start, HUGE_PAGE_BYTES)
    if address > start:
        libc.munmap(start, address - start)
    if (rest := start + reserved - address - num_bytes) > 0:
        libc.munmap(address + num_bytes, rest)
    return int(address)


def _require_giving_back(address: int, num_bytes: int) -> None:
    """Unmap the range and raise `PinError` if the kernel cannot take reserved huge pages back. A range without any page
    shows that, too."""
    if libc.madvise(address, num_bytes, _MADV_DONTNEED) != 0:
        what = error_text()
        libc.munmap(address, num_bytes)
        raise PinError("hugepages", f"a pool in reserved huge pages needs Linux 5.18: MADV_DONTNEED failed with {what}")


def _touch(address: int, num_bytes: int) -> None:
    """Populate the range by writing to every page. From Linux 6.4 on, a page fault locks only its own mapping, whereas
    MADV_POPULATE_WRITE locks the whole address space.

    numpy releases the GIL only for 500 elements (2 MiB) or more. Smaller pieces held it, and made vLLM's eager steps
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
    """Let the kernel populate every page, so that no later access can fail or wait."""
    for start, size in _populate_pieces(address, num_bytes):
        if ctypes.get_errno() == errno.EINVAL:  # a kernel before 5.14
            _touch(start, size)
        else:
            raise PinError("out_of_memory", f"populating {format_size(num_bytes)} failed: {error_text()}")


def _populate_reserved(address: int, num_bytes: int) -> None:
    """Let the kernel populate every reserved huge page. Touching a page that is missing would raise SIGBUS."""
    for _, size in _populate_pieces(address, num_bytes):
        is_short = ctypes.get_errno() == errno.EFAULT
        why = "the machine or the cgroup has no reserved 2 MiB page left" if is_short else error_text()
        raise PinError("hugepages", f"populating {format_size(size)} failed: {why}")


def _populate_pieces(address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Let the kernel populate the range piece by piece. Yields the start and the size of each piece that the kernel
    refuses, while errno says why."""
    for start in range(address, address + num_bytes, _POPULATE_BYTES):
        size = min(_POPULATE_BYTES, address + num_bytes - start)
        if libc.madvise(start, size, MADV_POPULATE_WRITE) != 0:
            yield start, size


def _check(result: int, what: str, num_bytes: int) -> None:
    if result != 0:
        raise PinError("out_of_memory", f"{what} of {format_size(num_bytes)} failed: {error_text()}")


def error_text() -> str:
    """Describe the last error of `libc` or `quick` by its name and its text."""
    code = ctypes.get_errno()
    return f"{errno.errorcode.get(code, code)} ({os.strerror(code)})"


def prefer_node(address: int, num_bytes: int, node: int) -> str | None:
    """Prefer `node` for pages that the range gets from now on. `address` is a multiple of the page size. If the kernel
    refuses, the memory works nevertheless, and the function returns a sentence for operators."""
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
    """Count the bytes of the populated range on each node. It asks for one page in every `step` bytes, which takes 2 us
    each; one page of a huge page shows the node of all. Empty if the kernel refuses, as in some containers."""
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
    """Return the nodes of the machine that have memory. Returns (None,) if there is only one, or if the kernel does not
    report them."""
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",")]
        nodes = tuple(node for part in parts for node in range(int(part[0]), int(part[-1]) + 1))
    except (OSError, ValueError):
        return (None,)
    return nodes if len(nodes) > 1 else (None,)


def _refusal(node: int, why: str) -> str:
    return f"the pool is not bound to NUMA node {node} of its device: {why}"
