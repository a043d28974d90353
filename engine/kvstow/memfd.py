"""Shared memory without a name in any file system: memfds of a fixed size that only their owner may open again.

A memfd lives as long as one file descriptor or one mapping of it is left in any process. The kernel shows in three ways
whether its memory is free, and each of them alone has a gap (all tried on Linux 6.18):

- The kernel refuses a write lease while the file is open elsewhere: through a descriptor, a mapping of any kind, or a
  message under way. It counts open files and not descriptors, and it does not count the file that `memfd_create` has
  made. So clients get files of their own (`open_for_client`).
- The kernel refuses the seal `F_SEAL_WRITE` while the file is mapped for writing, or while a page is pinned, as by
  vmsplice or a device, whether or not the page is still mapped.
- Inotify reports `IN_DELETE_SELF` when the last descriptor and the last mapping have gone. This includes descriptors
  with `O_PATH`, which the lease does not see.

So memory is free if no other process has it open, if it could then be sealed, and if inotify reports its end after its
owner has closed it. Punching holes proves nothing: pinned pages survive it, but the seal no longer sees them, and a
memfd that is sealed takes no hole (EPERM). The figures of a cgroup prove nothing either, because other memory changes
them at the same time.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import stat
import struct
from contextlib import suppress
from typing import NamedTuple

from kvstow.bytesize import format_size
from kvstow.errors import ForeignMemoryError, PinError

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""The seals of our memfds. Without them, a process that shrinks the file would give all others SIGBUS. Holes can be
punched all the same. Further seals are allowed, because `seal_writes` adds one, so any process that has a descriptor
can add seals, too."""

MODE = 0o600
"""The mode of our memfds. The default, 0777, lets any uid open a read-only descriptor again for writing, through
/proc/PID/fd."""

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1
_FOREIGN_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE
"""Seals that we do not set when we make a memfd."""

_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; machines with vm.memfd_noexec = 2 refuse memfds without it
_F_SETSIG = 10
_IN_DELETE_SELF = 0x400
_INOTIFY_EVENT = struct.Struct("iIII")  # watch, what happened, cookie, length of a name
_INOTIFY_BYTES = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)


class MemfdIdentity(NamedTuple):
    """Tells a memfd from all others, until it is gone."""

    device: int
    inode: int
    num_bytes: int


def create_memfd(name: str, num_bytes: int, *, reserved_huge_pages: bool = False) -> int:
    """Create a memfd of `num_bytes` that takes no memory yet. It is sealed, for this uid only, and closed in programs
    that this process starts. The caller closes it. Raises `PinError`."""
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


def is_unsealed(fd: int) -> bool:
    """Whether no process has added a seal. If so, the memfd can be mapped for writing, and `seal_writes` works."""
    return not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FOREIGN_SEALS


def open_for_client(fd: int) -> int:
    """Make another descriptor of the memfd, with an open file of its own, so that `is_open_elsewhere` sees it. The
    caller closes it. Raises `OSError`."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def is_open_elsewhere(fd: int) -> bool:
    """Whether a process still has a descriptor of `open_for_client`, or a mapping through one. `fd` is the descriptor
    that `create_memfd` has made. Raises `OSError`."""
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # If another process opens the file just now, the kernel signals this one. SIGIO, the default, would end it.
        fcntl.fcntl(reader, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(reader, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(reader, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    finally:
        os.close(reader)
    return False


def seal_writes(fd: int) -> bool:
    """Make it impossible to write to the memfd from now on. Returns False, and changes nothing, while any process maps
    it for writing (at once) or some of it is pinned (after 0.2 s)."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def require_memfd(fd: int, name: str, num_bytes: int, *, identity: MemfdIdentity | None = None) -> None:
    """Raises `ForeignMemoryError` unless `fd` is a memfd as `create_memfd` makes it for this uid, with this name and
    size, and with this `identity` if one is given. The caller still owns `fd`."""
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
    if seals & SEALS != SEALS or seals & _FOREIGN_SEALS:
        raise ForeignMemoryError(f"the memfd {name} has the seals {seals:#x}, not {SEALS:#x}")
    if access != os.O_RDWR:
        raise ForeignMemoryError(f"the memfd {name} is not open for reading and writing")
    if identity is not None and identify_memfd(fd) != identity:
        raise ForeignMemoryError(f"this memfd is another one with the name {name}")


def populated_prefix(fd: int, *, reserved_huge_pages: bool = False) -> int:
    """How many bytes from the start of the memfd have memory, without a gap."""
    found = os.fstat(fd)
    if reserved_huge_pages:  # these files do not tell where holes are
        return min(found.st_blocks * 512, found.st_size)
    return os.lseek(fd, 0, os.SEEK_HOLE) if found.st_size else 0


class MemfdEnds:
    """Tells which of the memfds that this process has closed still exist. Not locked."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._numbers: dict[int, int] = {}

    def watch(self, fd: int, number: int) -> None:
        """Watch a memfd: `remaining` has the number until the memfd is gone. Raises `OSError`."""
        path = f"/proc/self/fd/{fd}".encode()
        self._numbers[_checked(_libc.inotify_add_watch(self._fd, path, _IN_DELETE_SELF))] = number

    def remaining(self) -> set[int]:
        """The numbers of the memfds that some process still has. Does not wait."""
        with suppress(BlockingIOError):
            while data := os.read(self._fd, _INOTIFY_BYTES):
                for watch, what, _, _ in _INOTIFY_EVENT.iter_unpack(data):  # without names, as nothing is a folder
                    if what & _IN_DELETE_SELF:
                        self._numbers.pop(watch, None)
        return set(self._numbers.values())

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _create(name: str, flags: int) -> int:
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, flags)
