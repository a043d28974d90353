"""The two files of a path, as the child process of the path uses them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvstow_service.stores.disk.diskformat import MIN_ALIGNMENT

FOLDER: Final = "kvstow"
_DATA, _RECORDS = "data", "records"

_FILE_SYSTEMS = {0xEF53: "ext4", 0x58465342: "XFS"}
_OTHER_FILE_SYSTEMS = {
    0x6969: "NFS",
    0x0BD00BD0: "Lustre",
    0x65735546: "FUSE",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
    0x9123683E: "Btrfs",
    0x2FC12FC1: "ZFS",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
}
_FREE_SHARE, _LEFT_SHARE = 0.80, 0.15
_ZERO_RANGE, _KEEP_SIZE = 0x10, 0x01
_EMPTY_PATH, _DIOALIGN, _STATX_BYTES, _ALIGN_AT = 0x1000, 0x2000, 256, 152

_libc = ctypes.CDLL(None, use_errno=True)


class PathError(Exception):
    """A path cannot be used for blocks, for a reason that does not go away by itself. A sentence without the path."""


class PathBusyError(Exception):
    """Another process has the files."""


class FilesRemovedError(Exception):
    """Somebody has removed the files. The open ones still work, but a later start would not find them."""


class DiskFiles:
    """The data file and the records file of a path. Thread-safe. All calls may wait for the disk, and raise `OSError`.
    Data bypasses the page cache in both directions, so buffers, offsets and sizes for it are multiples of the
    alignment. A call reads or writes all of the bytes, or raises."""

    def __init__(self, folder_fd: int) -> None:
        """Opens the files, and creates them if there are none. The caller keeps `folder_fd`. Raises `PathBusyError`,
        `PathError` or `OSError`."""
        self._records = _open_file(folder_fd, _RECORDS, 0)
        try:
            try:
                fcntl.flock(self._records, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PathBusyError("another process has its files") from None
            self._data = _open_file(folder_fd, _DATA, os.O_DIRECT)
            os.fsync(folder_fd)
        except BaseException:
            os.close(self._records)
            raise
        self.alignment = alignment_of(self._data)

    def read_data(self, buffers: Sequence[memoryview], at: int) -> None:
        _require_all(os.preadv(self._data, buffers, at), buffers)

    def write_data(self, buffers: Sequence[memoryview], at: int) -> None:
        _require_all(os.pwritev(self._data, buffers, at), buffers)

    def zero_data(self, at: int, num_bytes: int) -> None:
        """Make these bytes zeros for every reader of the file. Their space stays allocated."""
        _fallocate(self._data, _ZERO_RANGE | _KEEP_SIZE, at, num_bytes)

    def read_records(self, at: int, num_bytes: int) -> bytes:
        """Return these bytes, which are zeros in a hole and behind the end."""
        data = os.pread(self._records, num_bytes, at)
        return data.ljust(num_bytes, b"\0")

    def write_records(self, at: int, data: bytes) -> None:
        if os.pwrite(self._records, data, at) != len(data):
            raise OSError(errno.EIO, "the records file took only a part of what was written")

    def sync(self) -> None:
        """Let everything that was written before this survive a power cut; first the data, then the records. Raises
        `FilesRemovedError` if nothing would survive the next start."""
        os.fdatasync(self._data)
        os.fdatasync(self._records)
        if not (os.fstat(self._records).st_nlink and os.fstat(self._data).st_nlink):
            raise FilesRemovedError("somebody has removed its files: it begins anew with empty ones")

    def sync_records(self) -> None:
        """Do what `sync` does for the records alone."""
        os.fdatasync(self._records)

    def resize(self, data_bytes: int, records_bytes: int) -> None:
        """Give the data file this size, with all space allocated, and the records file at least this size."""
        if os.fstat(self._data).st_size > data_bytes:
            os.ftruncate(self._data, data_bytes)
        _fallocate(self._data, 0, 0, data_bytes)
        if os.fstat(self._records).st_size < records_bytes:
            os.ftruncate(self._records, records_bytes)
        os.fsync(self._data)
        os.fsync(self._records)

    def close(self) -> None:
        os.close(self._data)
        os.close(self._records)


def _require_all(count: int, buffers: Sequence[memoryview]) -> None:
    expected = sum(len(one) for one in buffers)
    if count != expected:
        raise OSError(errno.EIO, f"the disk moved {count} of {expected} bytes")


def _open_file(folder_fd: int, name: str, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=folder_fd)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            raise PathError(f"its file {FOLDER}/{name} is not a plain file of this user with one name")
        os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _fallocate(fd: int, mode: int, at: int, num_bytes: int) -> None:
    while _libc.fallocate(fd, mode, ctypes.c_int64(at), ctypes.c_int64(num_bytes)):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def alignment_of(fd: int) -> int:
    """Return how many bytes the addresses, offsets and sizes of direct I/O on this file must be multiples of, which are
    at least 4 KiB. Raises `PathError` if the file system has no direct I/O."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(fd, b"", _EMPTY_PATH, _DIOALIGN, found) or not int.from_bytes(found.raw[:4], "little") & _DIOALIGN:
        return MIN_ALIGNMENT  # kernels before 6.1 do not say
    memory, offset = (int.from_bytes(found.raw[at : at + 4], "little") for at in (_ALIGN_AT, _ALIGN_AT + 4))
    if not offset:
        raise PathError("its file system has no direct I/O")
    return max(MIN_ALIGNMENT, memory, offset)


# -- the folder ---------------------------------------------------------------------------------------------------


class FolderFacts(NamedTuple):
    """What is known of a path's folder. `device`: the device of its file system. `default_bytes`: the size of its data
    file if none is configured; None on the root file system. `own_bytes`: how much KVStow's files take."""

    device: int
    alignment: int
    free_bytes: int
    total_bytes: int
    own_bytes: int
    default_bytes: int | None


def open_folder(path: Path) -> int:
    """Open the folder `kvstow` in `path`, which is made if there is none. Returns a descriptor, which the caller owns.
    Raises `PathError` or `OSError`."""
    try:
        outer = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise PathError("there is no such folder") from None
    except NotADirectoryError:
        raise PathError("it is not a folder, or a symbolic link: name the folder itself") from None
    try:
        _require_file_system(outer)
        try:
            os.mkdir(FOLDER, 0o700, dir_fd=outer)
            os.fsync(outer)
        except FileExistsError:
            pass
        try:
            fd = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=outer)
        except NotADirectoryError:
            raise PathError(f"{FOLDER} in it is not a folder, or a symbolic link") from None
        try:
            _require_own_folder(fd, outer)
        except BaseException:
            os.close(fd)
            raise
        return fd
    finally:
        os.close(outer)


def _require_file_system(fd: int) -> None:
    kind = _kind_of_file_system(fd)
    if kind not in _FILE_SYSTEMS:
        known = _OTHER_FILE_SYSTEMS.get(kind, f"a file system of type {kind:#x}")
        raise PathError(f"it is on {known}; disks for blocks have ext4 or XFS")


def _kind_of_file_system(fd: int) -> int:
    found = ctypes.create_string_buffer(256)
    if _libc.fstatfs(fd, found):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int.from_bytes(found.raw[:8], "little") & 0xFFFFFFFF


def _require_own_folder(fd: int, outer: int) -> None:
    found = os.fstat(fd)
    if found.st_dev != os.fstat(outer).st_dev:
        raise PathError(f"{FOLDER} in it is on another file system")
    if found.st_uid != os.geteuid():
        raise PathError(f"{FOLDER} in it belongs to uid {found.st_uid}, and this service runs as uid {os.geteuid()}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.fchmod(fd, 0o700)


def facts_of(folder_fd: int) -> FolderFacts:
    """Return the facts of a folder. Raises `PathError` or `OSError`."""
    space = os.fstatvfs(folder_fd)
    own = sum(_allocated(folder_fd, name) for name in (_DATA, _RECORDS))
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    device = os.fstat(folder_fd).st_dev
    default = None
    if device != os.stat("/").st_dev:
        default = max(0, int(min(_FREE_SHARE * (free + own), free + own - _LEFT_SHARE * total)))
    return FolderFacts(device, alignment_of(folder_fd), free, total, own, default)


def _allocated(folder_fd: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0
