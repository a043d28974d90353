"""Shared memory without a name in any file system: memfds of a fixed size that only their owner may open again.

A memfd lives as long as one file descriptor or one mapping of it is left in any process. Three things that the kernel
tells say when its memory is free, and each of them alone has a gap (all tried on Linux 6.18):

- A write lease is refused while the file is open anywhere besides: a descriptor, a mapping of any kind, a message that
  is under way. It counts open files and not descriptors, and not the one that `memfd_create` has made. So clients get
  files of their own (`open_for_client`).
- The seal `F_SEAL_WRITE` is refused while the file is mapped for writing, or while a page is pinned, as by vmsplice or
  a device, whether or not it is mapped still.
- Inotify reports `IN_DELETE_SELF` when the last descriptor and the last mapping have gone, descriptors with `O_PATH`
  included, which the lease does not see.

So memory is free that nobody else has open, that was sealed then, and whose end is reported after its owner has closed
it. Holes prove nothing: pinned pages survive a punched one, but the seal does not see them any more, and a memfd that
is sealed takes no hole (EPERM). Nor do the figures of a cgroup, which other memory changes at the same time.
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

# Without them, one process that shrinks the file gives all others SIGBUS. Holes can be punched all the same. The seals
# are not sealed themselves, because `seal_writes` adds one. So whoever has a descriptor can add seals, too.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
MODE = 0o600  # the default, 0777, lets any uid open a read-only descriptor again for writing, through /proc/PID/fd

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1
_FOREIGN_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE
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


def is_unsealed(fd: int) -> bool:
    """Whether nobody has added a seal: the memfd can be mapped for writing, and `seal_writes` works."""
    return not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FOREIGN_SEALS


def open_for_client(fd: int) -> int:
    """Another descriptor of the memfd, with an open file of its own, so that `is_open_elsewhere` sees it. The caller
    closes it. Raises `OSError`."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def is_open_elsewhere(fd: int) -> bool:
    """Whether a descriptor or a mapping is left of those that `open_for_client` has made. `fd` is that of the memfd
    itself. Raises `OSError`."""
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Whoever opens the file at this very moment has this process signalled. SIGIO, the default, would end it.
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
    if seals & SEALS != SEALS or seals & _FOREIGN_SEALS:
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


class MemfdEnds:
    """Tells which memfds exist still, of those that this process has closed. Not locked."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._numbers: dict[int, int] = {}

    def watch(self, fd: int, number: int) -> None:
        """`remaining` has the number until the memfd is gone. Raises `OSError`."""
        path = f"/proc/self/fd/{fd}".encode()
        self._numbers[_checked(_libc.inotify_add_watch(self._fd, path, _IN_DELETE_SELF))] = number

    def remaining(self) -> set[int]:
        """The numbers of the memfds that some process has still. Does not wait."""
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
