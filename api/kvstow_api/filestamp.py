"""Whether a file has changed since it was read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Self


class FileStamp(NamedTuple):
    """Identifies one version of a file's content and permissions."""

    inode: int
    mtime_ns: int
    size: int
    mode: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Raises `OSError` if it is not there or out of reach."""
        return cls.from_status(os.stat(path))

    @classmethod
    def from_status(cls, status: os.stat_result) -> Self:
        return cls(status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)
