"""An extent of the node service, mapped into the process of a client."""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np

from kvstow.bytesize import format_size
from kvstow.errors import PinError
from kvstow.memory.region import PAGE_BYTES, HostRegion

_PIECE_BYTES = 8 << 20  # per call that makes pages present: meanwhile an mmap of any thread waits

_PROT_NONE, _PROT_READ_WRITE = 0, 1 | 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MADV_DONTFORK, _MADV_POPULATE_READ = 10, 22

_libc = ctypes.CDLL(None, use_errno=True)
_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.madvise.argtypes = (_address, _size, _int)

# Calls of some microseconds keep the interpreter lock: beside a host that computes in Python, each that let go of it
# would wait 5 ms.
_quick = ctypes.PyDLL(None, use_errno=True)
_quick.mmap.restype, _quick.mmap.argtypes = _address, (_address, _size, _int, _int, _int, ctypes.c_long)
_quick.madvise.argtypes = _libc.madvise.argtypes


class ExtentMapping:
    """Address space for an extent, aligned to a huge page. `map` and `unmap` say which of the extent's bytes are in it;
    a child process inherits none.

    Not locked: one thread at a time. The owner calls `close`, which is idempotent.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Takes over `fd`. Raises `PinError` if there is no address space; then the caller still owns it."""
        self._region = HostRegion(num_bytes)
        self.fd = fd
        self.num_bytes = num_bytes
        self.address = self._region.address

    def map(self, start: int, end: int) -> None:
        """Map these bytes, which are whole pages of 2 MiB and have memory already, and make their pages present: so
        registering them is twice as fast. Raises `PinError`, with nothing of the range mapped.

        Bytes without memory would get some, at this process's expense."""
        address, size = self.address + start, end - start
        flags = _MAP_SHARED | _MAP_FIXED
        if _quick.mmap(address, size, _PROT_READ_WRITE, flags, self.fd, start) != address:
            raise PinError("out_of_memory", f"mapping {format_size(size)} of the node's memory failed: {_error_text()}")
        try:
            _quick.madvise(address, size, _MADV_DONTFORK)
            for offset in range(0, size, _PIECE_BYTES):
                _make_present(address + offset, min(_PIECE_BYTES, size - offset))
        except BaseException:
            self.unmap(start, end)
            raise

    def unmap(self, start: int, end: int) -> None:
        """Replace the range with reserved address space."""
        address, size = self.address + start, end - start
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        if _quick.mmap(address, size, _PROT_NONE, flags, -1, 0) != address:
            raise PinError("out_of_memory", f"unmapping {format_size(size)} failed: {_error_text()}")
        _quick.madvise(address, size, _MADV_DONTFORK)

    def close(self) -> None:
        """Unmap everything, and close the descriptor."""
        self._region.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _make_present(address: int, num_bytes: int) -> None:
    if _libc.madvise(address, num_bytes, _MADV_POPULATE_READ) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise PinError("out_of_memory", f"mapping {format_size(num_bytes)} failed: {_error_text()}")
    pages = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))  # a kernel before 5.14
    pages[::PAGE_BYTES].max()


def _error_text() -> str:
    code = ctypes.get_errno()
    return f"{errno.errorcode.get(code, code)} ({os.strerror(code)})"
