"""How the agents of an engine's ranks find the admin server on the same machine.

The server starts late, in a process that the ranks do not know. Both sides know the engine's identity: it names a Unix
socket and a file with the agents' token, in a folder that only this user can enter.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvstow.errors import ConflictError, SettingError
from kvstow_service.admin.agent import AdminAddress
from kvstow_service.admin.sockets import AdminSockets, is_listening

logger = logging.getLogger("kvstow.rendezvous")

_MOST_PATH_BYTES = 107  # of a Unix socket, on Linux
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class _Published(NamedTuple):
    socket: Path
    token: str
    lock: int
    """Descriptor of the locked token file."""


class Rendezvous:
    """The socket and the token file of one engine. `identity` must be unique on this machine.

    The folder is `kvstow-UID`, of mode 0700, in `XDG_RUNTIME_DIR` (`/run/user/UID` if that is not set) or in the folder
    for temporary files. A folder that another user owns, or that others may enter, is not used.

    A rank's agent calls the object to find the server. The engine's host publishes the server once and withdraws it.
    The host keeps its token file locked: a host that publishes removes files that no living process has locked.
    """

    def __init__(self, identity: str, environ: Mapping[str, str] = os.environ) -> None:
        uid = os.geteuid()
        # Also without the variable: ranks are not always started with the environment of their host.
        runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
        parents = [Path(runtime)]
        with suppress(FileNotFoundError):  # no temporary folder is writable
            parents.append(Path(tempfile.gettempdir()))
        self._folders = [parent / f"kvstow-{uid}" for parent in parents]
        self._identity = identity
        self._published: _Published | None = None
        self._refused: set[Path] = set()

    def __call__(self) -> AdminAddress | None:
        """The server's address; None while no server listens. Raises `OSError` if that cannot be determined."""
        for folder in self._folders:
            path = self._visit(folder)
            if path is not None and is_listening(path):  # checked first: the token is written before the socket listens
                return AdminAddress("http://kvstow", _token_path(path).read_text(), path)
        return None

    def publish(self, sockets: AdminSockets, token: str) -> None:
        """Write the token, then listen. Raises `ConflictError` if no folder can be used, or if another server has
        published this identity."""
        path = self._make_place()
        try:
            with _locked(path.parent):  # otherwise `_sweep` could remove a file that is being written
                if is_listening(path):
                    raise ConflictError(f"another engine with the identity {self._identity!r} listens on unix:{path}")
                self._published = _Published(path, token, _write_locked(_token_path(path), token))
                sockets.listen_unix(path)
                _sweep(path.parent)
        except OSError as error:
            raise ConflictError(f"cannot publish the admin server's address to agents: {error}") from error

    def withdraw(self) -> None:
        """Remove the token file unless a successor has replaced it; `AdminSockets` removes the socket. Idempotent."""
        published, self._published = self._published, None
        if published is None:
            return
        path = _token_path(published.socket)
        with suppress(OSError), _locked(path.parent):
            if path.read_text() == published.token:
                path.unlink()
        os.close(published.lock)

    def _make_place(self) -> Path:
        problems = []
        for folder in self._folders:
            try:
                with suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                path = _socket_path(folder, self._identity)
                if not os.access(folder, os.W_OK):
                    raise SettingError("runtime folder", folder, "is not writable")
                return path
            except (OSError, SettingError) as error:
                problems.append(str(error))
        hint = "set XDG_RUNTIME_DIR or TMPDIR to a folder that this user may write"
        raise ConflictError(
            f"no folder for the socket by which agents find the admin server: {'; '.join(problems)}; {hint}"
        )

    def _visit(self, folder: Path) -> Path | None:
        """The socket's path, if the folder exists and can be trusted."""
        try:
            return _socket_path(folder, self._identity)
        except FileNotFoundError:
            return None
        except (OSError, SettingError) as error:
            if folder not in self._refused:
                logger.warning("not looking for the admin server there: %s", error)
                self._refused.add(folder)
            return None


def _socket_path(folder: Path, identity: str) -> Path:
    """Raises `OSError` if the folder cannot be read, `SettingError` if others may enter it or its path is too long."""
    _require_private(folder)
    for name in (identity, hashlib.sha256(identity.encode()).hexdigest()[:16]):
        path = folder / f"{name}.sock"
        if _PLAIN_NAME.fullmatch(name) and len(os.fsencode(path)) <= _MOST_PATH_BYTES:
            return path
    raise SettingError("runtime folder", folder, f"has a path of more than {_MOST_PATH_BYTES - 22} bytes")


def _require_private(folder: Path) -> None:
    status = folder.lstat()
    uid = os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        raise SettingError("runtime folder", folder, "is not a folder")
    if status.st_uid != uid:
        raise SettingError("runtime folder", folder, f"belongs to user {status.st_uid}, not to user {uid}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise SettingError("runtime folder", folder, "can be entered by other users: chmod 700 it")


def _token_path(socket_path: Path) -> Path:
    return socket_path.with_suffix(".token")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: one process at a time creates and removes files in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove files that killed hosts left; an inference engine has a new identity at each start. The caller holds the
    folder's lock."""
    for token in folder.glob("*.token*"):  # also temporary files of writers that were killed
        with suppress(OSError):  # a busy socket is in use
            path = token.with_suffix(".sock")
            if not _is_locked(token) and not is_listening(path):
                path.unlink(missing_ok=True)
                token.unlink()


def _is_locked(token: Path) -> bool:
    """Whether the process that wrote this file is alive."""
    descriptor = os.open(token, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _write_locked(path: Path, text: str) -> int:
    """Replace the file atomically and return its descriptor, which holds a lock on it from before the file is visible
    until the descriptor is closed or the process ends."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, text.encode())
        partial.replace(path)
    except BaseException:
        os.close(descriptor)
        partial.unlink(missing_ok=True)
        raise
    return descriptor
