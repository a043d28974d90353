"""Files whose paths operators give: a path may also name a pipe, a device or a huge file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import NamedTuple

from kvstow_api.filestamp import FileStamp

MAX_FILE_BYTES = 1 << 20
"""Enough for any token list or certificate chain."""


class RegularFile(NamedTuple):
    """The content of a file, and the version that it had at that time."""

    content: bytes
    stamp: FileStamp

    @classmethod
    def read(cls, path: Path) -> RegularFile:
        """Waits for nothing but the file system. Raises `OSError`, also if it is not a regular file or is larger than
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
    """Which other users may use a file of this mode, in words; None if only its owner and readers of its group may.

    The group may read: that is how Kubernetes hands a Secret to a container that does not run as root.
    """
    readable, writable = mode & stat.S_IROTH, mode & (stat.S_IWOTH | stat.S_IWGRP)
    if not readable and not writable:
        return None
    what = " and ".join(word for word, given in (("read", readable), ("change", writable)) if given)
    return f"other users may {what} it (mode {stat.S_IMODE(mode):04o})"
