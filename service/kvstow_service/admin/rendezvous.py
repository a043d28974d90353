"""Where an engine's Unix sockets are, so that processes which know its identity find them: the ranks' agents, and the
admin server's clients."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kvstow.errors import ConflictError, SettingError
from kvstow_service.admin.sockets import is_listening

logger = logging.getLogger("kvstow.rendezvous")

ADMIN: Final = ".sock"
"""The suffix of the admin server's socket."""
RANKS: Final = ".ranks"
"""The suffix of the socket to which the ranks report."""
_MOST_PATH_BYTES = 107  # of a Unix socket, on Linux
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class Rendezvous:
    """The sockets of one engine. `identity` must be unique on this machine.

    The folder is `kvstow-UID`, of mode 0700, in `XDG_RUNTIME_DIR` (`/run/user/UID` if that is not set) or in the folder
    for temporary files. A folder that another user owns, or that others may enter, is not used: that is what lets
    the two sides trust each other.

    A rank's agent calls the object to find the ranks' socket. The engine's host publishes each of its sockets once.
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
        self._refused: set[Path] = set()

    def __call__(self) -> Path | None:
        """The ranks' socket; None while no engine listens. Raises `OSError` if that cannot be determined."""
        for folder in self._folders:
            path = self._visit(folder)
            if path is not None and is_listening(path):
                return path
        return None

    def publish(self, suffix: str, listen: Callable[[Path], object]) -> None:
        """Call `listen` with the path of one of the engine's sockets. Raises `ConflictError` if no folder can be used,
        or if another engine with this identity listens."""
        folder = self._make_folder()
        path = _socket_path(folder, self._identity, suffix)
        try:
            with _locked(folder):  # so each socket that does not listen belongs to a host that was killed
                if is_listening(path):
                    raise ConflictError(f"another engine with the identity {self._identity!r} listens on unix:{path}")
                listen(path)
                _sweep(folder)
        except OSError as error:
            raise ConflictError(f"cannot publish the socket {path}: {error}") from error

    def _make_folder(self) -> Path:
        problems = []
        for folder in self._folders:
            try:
                with suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                _socket_path(folder, self._identity, RANKS)
                if not os.access(folder, os.W_OK):
                    raise SettingError("runtime folder", folder, "is not writable")
                return folder
            except (OSError, SettingError) as error:
                problems.append(str(error))
        hint = "set XDG_RUNTIME_DIR or TMPDIR to a folder that this user may write"
        raise ConflictError(f"no folder can be used for the engine's sockets: {'; '.join(problems)}; {hint}")

    def _visit(self, folder: Path) -> Path | None:
        """The path of the ranks' socket, if the folder exists and can be trusted."""
        try:
            return _socket_path(folder, self._identity, RANKS)
        except FileNotFoundError:
            return None
        except (OSError, SettingError) as error:
            if folder not in self._refused:
                logger.warning("this rank does not look for its engine in that folder: %s", error)
                self._refused.add(folder)
            return None


def _socket_path(folder: Path, identity: str, suffix: str) -> Path:
    """Raises `OSError` if the folder cannot be read, `SettingError` if others may enter it or its path is too long."""
    _require_private(folder)
    for name in (identity, hashlib.sha256(identity.encode()).hexdigest()[:16]):
        if _PLAIN_NAME.fullmatch(name) and len(os.fsencode(folder / f"{name}{RANKS}")) <= _MOST_PATH_BYTES:
            return folder / f"{name}{suffix}"
    raise SettingError("runtime folder", folder, f"has a path of more than {_MOST_PATH_BYTES - 23} bytes")


def _require_private(folder: Path) -> None:
    status = folder.lstat()
    uid = os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        raise SettingError("runtime folder", folder, "is not a folder")
    if status.st_uid != uid:
        raise SettingError("runtime folder", folder, f"belongs to user {status.st_uid}, not to user {uid}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise SettingError("runtime folder", folder, "can be entered by other users: chmod 700 it")


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
    """Remove sockets that killed hosts left; an inference engine has a new identity at each start. The caller holds the
    folder's lock."""
    for path in (*folder.glob(f"*{ADMIN}"), *folder.glob(f"*{RANKS}")):
        with suppress(OSError):  # a busy socket is in use
            if not is_listening(path):
                path.unlink()
