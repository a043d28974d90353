"""Files that operators name: reading them safely, as a path may also name a pipe, a device or a huge file, and noticing
that they have changed."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import NamedTuple, Self

MAX_FILE_BYTES = 1 << 20
"""Enough for any token list or certificate chain."""


class FileStamp(NamedTuple):
    """Identifies one version of a file's content and permissions."""

    inode: int
    mtime_ns: int
    size: int
    mode: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Raises `OSError` if the file cannot be found or accessed."""
        return cls.from_status(os.stat(path))

    @classmethod
    def from_status(cls, status: os.stat_result) -> Self:
        return cls(status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)


class RegularFile(NamedTuple):
    """The content of a file, and the stamp of that version."""

    content: bytes
    stamp: FileStamp

    @classmethod
    def read(cls, path: Path) -> RegularFile:
        """Blocks only on the file system. Raises `OSError`, also for a file that is not regular or is larger than
        `MAX_FILE_BYTES`."""
        # Without O_NONBLOCK, opening a pipe waits for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
        if len(content) > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_FILE_BYTES} bytes", str(path))
        return cls(content, FileStamp.from_status(status))


def exposure(mode: int) -> str | None:
    """Describes the access that other users have to a file of this mode; None if they have none.

    The group may read: Kubernetes passes a Secret to a container that does not run as root in this way.
    """
    readable, writable = mode & stat.S_IROTH, mode & (stat.S_IWOTH | stat.S_IWGRP)
    if not readable and not writable:
        return None
    what = " and ".join(word for word, given in (("read", readable), ("change", writable)) if given)
    return f"other users may {what} it (mode {stat.S_IMODE(mode):04o})"
