"""A connection to the keeper, and the process at its other end."""

from __future__ import annotations

import os
import socket
import struct

_SO_PEERPIDFD = 77  # Linux 6.5
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class KeeperPeer:
    """One connection, the pidfd of the process that made it, and what it has put and not yet committed. The pidfd is
    None if the kernel cannot say which process that is."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.pidfd = _pidfd_of(connected)
        self.staged: dict[str, int] = {}

    def close(self) -> None:
        self.socket.close()
        for fd in self.staged.values():
            os.close(fd)
        self.staged.clear()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def uid_of(connected: socket.socket) -> int:
    return _credentials_of(connected)[1]


def _pidfd_of(connected: socket.socket) -> int | None:
    try:
        return connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pid = _credentials_of(connected)[0]
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def _credentials_of(connected: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid
