"""The roster: all that the next service has to know of the node, but for what the slots hold, in shared memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

from kvstow.control.indexjournal import packed_copy, read_header
from kvstow.errors import JournalError
from kvstow.memfd import create_memfd, require_memfd

ROSTER_NAME = "kvstow-roster"
_COPY_BYTES = 8 << 20  # takes memory as far as it is written
_STATE_BYTES = 4096
_FILE_BYTES = _STATE_BYTES + 2 * _COPY_BYTES
_VOID, _VALID, _IN_RECOVERY = b"\0", b"\1", b"\2"


class Roster:
    """A JSON document in a memfd that the keeper has, too. So what is written counts at once, whatever the keeper does.

    It is void when the service that writes it has no keeper: that keeper may lack descriptors by now, or have some for
    too long. The start that reads it marks it first. The next one that finds the mark does not read it, so nothing that
    it says can end two starts.
    """

    def __init__(self, fd: int) -> None:
        """Takes over `fd`. Use `create`."""
        self.fd = fd
        self._sequence = 0

    @classmethod
    def create(cls) -> Self:
        """A void one, until it is written. Raises `PinError`."""
        return cls(create_memfd(ROSTER_NAME, _FILE_BYTES))

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the content, all at once. Raises `JournalError` or `OSError`, and then the former content stands."""
        data = packed_copy(self._sequence + 1, content, _COPY_BYTES)
        at = _STATE_BYTES + (self._sequence + 1) % 2 * _COPY_BYTES
        if os.pwrite(self.fd, data, at) != len(data):
            raise JournalError("there is no memory for the roster of the node")
        self._sequence += 1
        if self._sequence == 1:
            os.pwrite(self.fd, _VALID, 0)

    def void(self) -> None:
        """It says nothing from now on, to nobody."""
        os.pwrite(self.fd, _VOID, 0)

    @staticmethod
    def read(fd: int) -> Mapping[str, Any]:
        """What an earlier service has written. Marks it. The caller still owns `fd`. Raises `ForeignMemoryError`,
        `OSError` or `JournalError`."""
        require_memfd(fd, ROSTER_NAME, _FILE_BYTES)
        state = os.pread(fd, 1, 0)
        if state == _IN_RECOVERY:
            raise JournalError("a start that has read the roster before has not come to its end")
        if state != _VALID:
            raise JournalError("the service that wrote the roster has lost its keeper since")
        os.pwrite(fd, _IN_RECOVERY, 0)
        return read_header(os.pread(fd, 2 * _COPY_BYTES, _STATE_BYTES), _COPY_BYTES).found

    def close(self) -> None:
        """The keeper still has it. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
