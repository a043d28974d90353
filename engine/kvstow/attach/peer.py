"""The process at the other end of a Unix socket: identifies it, and notices its end."""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstow.errors import AttachRefusedError

if TYPE_CHECKING:
    from kvstow.status import ProcessState

_SO_PEERPIDFD = 77
"""A socket option since Linux 6.5, which works across pid namespaces. Python has no name for it."""
_CREDENTIALS = struct.Struct("3i")
_PID = re.compile(r"^Pid:\s*(-?\d+)$", re.MULTILINE)
_EFFECTIVE_UID = re.compile(r"^Uid:\s*\d+\s+(\d+)", re.MULTILINE)
_NO_DESCRIPTOR_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})
_NO_PIDFD_ERRNOS = frozenset({errno.ENOPROTOOPT, errno.EINVAL, errno.EOPNOTSUPP})


def overflow_uid() -> int:
    """Return the uid that the kernel shows for every user that this process's user namespace does not map."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except OSError:
        return 65534


class PeerCredentials(NamedTuple):
    """The process, the user and the group at the other end of a Unix socket."""

    pid: int
    uid: int
    gid: int


def credentials_of(connected: socket.socket) -> PeerCredentials:
    """Return the credentials that the process at the other end had when it connected."""
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return PeerCredentials(*_CREDENTIALS.unpack(data))


class Peer:
    """A process that has connected. `pid` is its number in this process's pid namespace, or 0 if it is not visible
    there. `uid` and `gid` are mapped to this process's user namespace. `pidfd` becomes readable when the process has
    ended and the kernel has closed its files. It is None if it is not available. This object owns it."""

    __slots__ = ("gid", "pid", "pidfd", "uid")

    def __init__(self, pid: int, uid: int, gid: int, pidfd: int | None) -> None:
        self.pid = pid
        self.uid = uid
        self.gid = gid
        self.pidfd = pidfd

    def has_ended(self) -> bool:
        """Whether the process has ended. False without a pidfd."""
        if self.pidfd is None:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def is_gone(self) -> bool:
        """Whether the process has ended, also if this peer is closed. A process with its number may be another one, so
        False may be wrong. True is not."""
        return self.has_ended() or (self.pid > 0 and not Path(f"/proc/{self.pid}").exists())

    def is_same_process(self, other: Peer) -> bool:
        """Whether both are the same process, and it has not ended. False if that cannot be known."""
        if self.pidfd is None or other.pidfd is None or self.has_ended():
            return False
        if self.pid and self.pid == other.pid:
            return not other.has_ended()  # two living processes have different numbers
        mine, theirs = _inode(self.pidfd), _inode(other.pidfd)
        return mine == theirs and mine != _shared_inode()

    def kill(self) -> bool:
        """Send SIGKILL. Returns False if that is not possible or the process has ended. Never kills this process or a
        process of another user than `uid`, because the pidfd may come from the records of an earlier service."""
        if self.pidfd is None or not self._is_its_process(self.pidfd):
            return False
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except OSError:
            return False
        return True

    def _is_its_process(self, pidfd: int) -> bool:
        """Whether the pidfd belongs to a process of the peer's user other than this one. The kernel sends no signal to
        a process that is not visible here."""
        pid = pid_of(pidfd)
        if pid in (0, os.getpid()):
            return False
        found = _uid_of(pid)
        return found == self.uid and pid_of(pidfd) == pid  # otherwise the uid may be that of a later process

    def state(self) -> ProcessState:
        """Whether the process is stopped, as the kernel reports it."""
        if not self.pid:
            return "unknown"
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return "unknown"
        return "stopped" if text.rpartition(")")[2].split()[0] in "Tt" else "running"

    def copy(self) -> Peer:
        """Return a peer for the same process with a pidfd of its own. Raises `OSError` if this process can have no more
        descriptors."""
        return Peer(self.pid, self.uid, self.gid, None if self.pidfd is None else os.dup(self.pidfd))

    def close(self) -> None:
        """Close the pidfd. Idempotent."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def peer_of(
    connected: socket.socket, *, needs_pidfd: bool = True, open_pidfd: Callable[[int], int] = os.pidfd_open
) -> Peer:
    """Return the process that has connected this socket. Raises `AttachRefusedError` if this user namespace does not
    map its user, if it has already ended, or if `needs_pidfd` is set and its pidfd is not available."""
    pid, uid, gid = credentials_of(connected)
    if uid == overflow_uid():
        raise AttachRefusedError(
            "uid",
            f"uid {uid} is the kernel's overflow uid: it stands for every user that the service's user namespace does "
            "not map. Run the engine as a mapped user",
        )
    try:
        pidfd: int | None = _peer_pidfd(connected)
    except OSError as error:
        if error.errno in _NO_DESCRIPTOR_ERRNOS:
            raise _no_descriptor(error) from error
        if error.errno not in _NO_PIDFD_ERRNOS:
            raise _ended() from error
        pidfd = _open_visible(connected, pid, open_pidfd)
    if pidfd is None and needs_pidfd:
        raise AttachRefusedError(
            "no_pidfd",
            "the service cannot see when this process ends: the kernel is older than 6.5, and the process is in "
            "another pid namespace. Run both in one pid namespace (hostPID), use a newer kernel, or start the "
            "service with --trust-eof SECONDS",
        )
    return Peer(pid, uid, gid, pidfd)


def _peer_pidfd(connected: socket.socket) -> int:
    fd = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    os.set_inheritable(fd, False)
    return fd


def _open_visible(connected: socket.socket, pid: int, open_pidfd: Callable[[int], int]) -> int | None:
    """Open a pidfd by the process number, for kernels before 6.5. Returns None if the process is not visible.

    If the peer has ended, the number may belong to another process by now. The peer's socket is then closed, so it is
    checked afterwards.
    """
    if pid <= 0:
        return None
    try:
        pidfd = open_pidfd(pid)
    except ProcessLookupError as error:
        raise _ended() from error
    except OSError as error:
        if error.errno in _NO_DESCRIPTOR_ERRNOS:
            raise _no_descriptor(error) from error
        return None
    poll = select.poll()
    poll.register(connected, select.POLLHUP | select.POLLRDHUP)
    if poll.poll(0):
        os.close(pidfd)
        raise _ended()
    return pidfd


def pid_of(pidfd: int) -> int:
    """Return the number of the process in this process's pid namespace. 0 if it is not visible there, or has ended."""
    found = _PID.search(Path(f"/proc/self/fdinfo/{pidfd}").read_text())
    return max(0, int(found[1])) if found else 0


def _uid_of(pid: int) -> int | None:
    """Return the effective uid, mapped to this process's user namespace. None if the process has ended."""
    try:
        found = _EFFECTIVE_UID.search(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def _inode(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _shared_inode() -> tuple[int, int]:
    """Return the inode that all pidfds shared before Linux 6.9. Since then, the pidfds of each process have their
    own."""
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        return _inode(fd)
    finally:
        os.close(fd)


def _no_descriptor(error: OSError) -> AttachRefusedError:
    return AttachRefusedError(
        "no_descriptors",
        f"the service can open no more files ({errno.errorcode[error.errno or 0]}: {error.strerror}): raise its limit",
    )


def _ended() -> AttachRefusedError:
    return AttachRefusedError("peer_ended", "the process that connected has ended")
