"""The service's state folder: the keeper's lock and socket. No KV is stored in it."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstow.errors import KeeperError

LOCK, SOCKET = "keeper.lock", "keeper.sock"
_MODE = 0o700
_LONGEST_PATH = 100  # of a socket; the kernel allows 107 bytes


def require_state_folder(folder: Path) -> Path:
    """Creates the folder if it does not exist. Raises `KeeperError` if others may enter it or it cannot be created."""
    try:
        folder.mkdir(mode=_MODE, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise KeeperError(f"the state folder {folder} cannot be used: {error.strerror}") from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        is_now = f"mode {found.st_mode & 0o777:o} of uid {found.st_uid}"
        raise KeeperError(f"the state folder {folder} has {is_now}; allowed: mode 700 of uid {os.geteuid()}")
    return folder


def try_lock(folder: Path) -> int | None:
    """A descriptor that holds the keeper's lock until it is closed, which the end of the process does, too. None if
    there is a keeper already."""
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def listen(folder: Path) -> socket.socket:
    """The keeper's socket, for this uid only. The caller holds the lock, so an existing socket has no owner."""
    (folder / SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _socket_path(folder) as path:
            listener.bind(path)
        os.chmod(folder / SOCKET, 0o600)
        listener.listen(8)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(folder: Path, timeout: float) -> socket.socket:
    """A connection to the keeper. Raises `OSError` if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout)
        with _socket_path(folder) as path:
            connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _socket_path(folder: Path) -> Iterator[str]:
    """A path of the socket that is short enough for the kernel."""
    path = str(folder / SOCKET)
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)
