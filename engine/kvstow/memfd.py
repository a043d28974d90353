"""Shared memory without a name in any file system: memfds of a fixed size that only their owner may open again.

A memfd lives as long as one file descriptor or one mapping of it is left in any process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import NamedTuple

from kvstow.bytesize import format_size
from kvstow.errors import ForeignMemoryError, PinError

# Without them, one process that shrinks the file gives all others SIGBUS. Holes can be punched all the same.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MODE = 0o600  # the default, 0777, lets any uid open a read-only descriptor again for writing, through /proc/PID/fd

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1
_READ_ONLY_SEALS = fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; machines with vm.memfd_noexec = 2 refuse memfds without it


class MemfdIdentity(NamedTuple):
    """Tells a memfd from all others, until it is gone."""

    device: int
    inode: int
    num_bytes: int


def create_memfd(name: str, num_bytes: int, *, reserved_huge_pages: bool = False) -> int:
    """A memfd of `num_bytes` that takes no memory yet: sealed, for this uid only, closed in programs that this process
    starts. The caller closes it. Raises `PinError`."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if reserved_huge_pages:
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    try:
        fd = _create(name, flags)
        try:
            os.ftruncate(fd, num_bytes)
            os.fchmod(fd, MODE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        reason = "hugepages" if reserved_huge_pages else "out_of_memory"
        what = errno.errorcode.get(error.errno or 0, str(error.errno))
        raise PinError(
            reason, f"cannot create shared memory of {format_size(num_bytes)}: {what} ({error.strerror})"
        ) from error
    return fd


def identify_memfd(fd: int) -> MemfdIdentity:
    found = os.fstat(fd)
    return MemfdIdentity(found.st_dev, found.st_ino, found.st_size)


def require_memfd(fd: int, name: str, num_bytes: int, *, identity: MemfdIdentity | None = None) -> None:
    """Raises `ForeignMemoryError` unless `fd` is as `create_memfd` made it for this uid, with this name and size. With
    an `identity`, unless it is that very one. The caller still owns `fd`."""
    try:
        found = os.fstat(fd)
        path = os.readlink(f"/proc/self/fd/{fd}")
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError as error:
        raise ForeignMemoryError(f"this is no memfd: {error.strerror}") from error
    if path != f"/memfd:{name} (deleted)" or not stat.S_ISREG(found.st_mode):
        raise ForeignMemoryError(f"this is {path}, not a memfd with the name {name}")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != MODE:
        who = f"uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
        raise ForeignMemoryError(f"the memfd {name} belongs to {who}, not to uid {os.geteuid()} with mode {MODE:o}")
    if found.st_size != num_bytes:
        raise ForeignMemoryError(f"the memfd {name} has {found.st_size} bytes, not {num_bytes}")
    if seals & SEALS != SEALS or seals & _READ_ONLY_SEALS:
        raise ForeignMemoryError(f"the memfd {name} has the seals {seals:#x}, not {SEALS:#x}")
    if access != os.O_RDWR:
        raise ForeignMemoryError(f"the memfd {name} is not open for reading and writing")
    if identity is not None and identify_memfd(fd) != identity:
        raise ForeignMemoryError(f"this memfd is another one with the name {name}")


def populated_prefix(fd: int, *, reserved_huge_pages: bool = False) -> int:
    """Bytes from the start of the memfd that have memory, without a gap."""
    found = os.fstat(fd)
    if reserved_huge_pages:  # these files do not tell where holes are
        return min(found.st_blocks * 512, found.st_size)
    return os.lseek(fd, 0, os.SEEK_HOLE) if found.st_size else 0


def _create(name: str, flags: int) -> int:
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, flags)
