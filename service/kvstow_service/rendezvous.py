"""Where the admin server of an embedded engine and the agents of its ranks find each other on one machine.

The server is made late, in a process that the ranks' processes do not know. What both know is the engine's identity;
it names a Unix socket, and beside it a file with the agents' token, in a folder that is this user's alone.
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

from kvstow.errors import ConfigError, ConflictError
from kvstow_service.agent import AdminAddress
from kvstow_service.sockets import AdminSockets, is_listening

logger = logging.getLogger("kvstow.rendezvous")

_MOST_PATH_BYTES = 107  # of a Unix socket, on Linux
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class _Published(NamedTuple):
    socket: Path
    token: str
    lock: int
    """The descriptor of the token's file, locked."""


class Rendezvous:
    """The meeting point of one engine. `identity` must be no other engine's on this machine.

    The folder is `kvstow-UID` in `XDG_RUNTIME_DIR` (`/run/user/UID` if that is not set), else in the folder for
    temporary files; mode 0700. One that somebody else owns, or others may enter, is not used.

    A rank's agent calls the object to look for the server. The engine's host publishes it, once, and withdraws it. It
    holds a lock on its token file for its lifetime: any host that publishes removes what killed hosts have left.
    """

    def __init__(self, identity: str, environ: Mapping[str, str] = os.environ) -> None:
        uid = os.geteuid()
        # The usual place without the variable, too: ranks are not always started with their host's environment.
        runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
        parents = [Path(runtime)]
        with suppress(FileNotFoundError):  # no temporary folder is writable
            parents.append(Path(tempfile.gettempdir()))
        self._folders = [parent / f"kvstow-{uid}" for parent in parents]
        self._identity = identity
        self._published: _Published | None = None
        self._refused: set[Path] = set()

    def __call__(self) -> AdminAddress | None:
        """The server's address; None while nobody listens. Raises `OSError` if that cannot be told."""
        for folder in self._folders:
            path = self._visit(folder)
            if path is not None and is_listening(path):  # asked first: the token is written before
                return AdminAddress("http://kvstow", _token_path(path).read_text(), path)
        return None

    def publish(self, listeners: AdminSockets, token: str) -> None:
        """Write the token, then listen. Raises `ConflictError` if no folder can be used, or another server is
        published under this identity."""
        path = self._make_place()
        try:
            with _locked(path.parent):  # or a sweep could mistake a file in the making for a leftover
                if is_listening(path):
                    raise ConflictError(f"another engine with the identity {self._identity!r} listens on unix:{path}")
                self._published = _Published(path, token, _write_locked(_token_path(path), token))
                listeners.listen_unix(path)
                _sweep(path.parent)
        except OSError as error:
            raise ConflictError(f"agents cannot be told where the admin server is: {error}") from error

    def withdraw(self) -> None:
        """Remove the token, unless a successor has replaced it; the socket goes with its listeners. Idempotent."""
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
                    raise ConfigError("runtime folder", str(folder), "a folder that can be written to")
                return path
            except (OSError, ConfigError) as error:
                problems.append(str(error))
        hint = "set XDG_RUNTIME_DIR or TMPDIR to a folder that this user can write to"
        raise ConflictError(f"agents have no place to find the admin server: {'; '.join(problems)}; {hint}")

    def _visit(self, folder: Path) -> Path | None:
        """The socket's path in a folder that is there and may be trusted."""
        try:
            return _socket_path(folder, self._identity)
        except FileNotFoundError:
            return None
        except (OSError, ConfigError) as error:
            if folder not in self._refused:
                logger.warning("no admin server is looked for there: %s", error)
                self._refused.add(folder)
            return None


def _socket_path(folder: Path, identity: str) -> Path:
    """Raises `OSError` if the folder cannot be read, and `ConfigError` if others may use it or its path is too long."""
    _require_private(folder)
    for name in (identity, hashlib.sha256(identity.encode()).hexdigest()[:16]):
        path = folder / f"{name}.sock"
        if _PLAIN_NAME.fullmatch(name) and len(os.fsencode(path)) <= _MOST_PATH_BYTES:
            return path
    raise ConfigError("runtime folder", str(folder), f"a path of at most {_MOST_PATH_BYTES - 22} bytes")


def _require_private(folder: Path) -> None:
    status = folder.lstat()
    uid = os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError("runtime folder", str(folder), "a folder, and no link to one")
    if status.st_uid != uid:
        raise ConfigError("runtime folder", str(folder), f"a folder of user {uid}, and not of user {status.st_uid}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError("runtime folder", str(folder), "a folder that nobody else may enter (chmod 700)")


def _token_path(socket_path: Path) -> Path:
    return socket_path.with_suffix(".token")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time creates and removes files there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove what killed hosts of other identities left; an inference engine has a new identity at each start. The
    caller has locked the folder."""
    for token in folder.glob("*.token*"):  # and what had not got its name when its writer was killed
        with suppress(OSError):  # the socket is busy, so it is in use
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
    """Replace the file in one step, so that nobody reads half of it. It is locked before it can be seen, until the
    descriptor is closed, which a killed process does too."""
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
