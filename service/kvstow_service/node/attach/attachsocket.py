"""The socket at which engines attach."""

from __future__ import annotations

import grp
import os
import socket
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvstow.errors import ConfigError, ConflictError
from kvstow_service.admin.sockets import bind_unix, file_id

FOLDER_MODE = 0o750
SOCKET_MODE = 0o660


class AttachSocket:
    """A listening Unix socket of mode 0660. If it had to create the folder, the folder has mode 0750.

    Processes of the service's user and of the group may write to the socket, and so may attach. The owner calls
    `close`, which is idempotent. It removes the file unless another service has replaced it.
    """

    def __init__(self, path: Path, group: int | None = None) -> None:
        """Raises `ConflictError` if another process listens there or the folder cannot be used."""
        self.path = path
        _require_folder(path.parent, group)
        self.listener: socket.socket = bind_unix(path, mode=SOCKET_MODE, group=group)
        self._file = file_id(path)

    def close(self) -> None:
        self.listener.close()
        if self._file is not None and file_id(self.path) == self._file:
            self.path.unlink(missing_ok=True)
        self._file = None


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where a service listens by default: `/run/kvstow/attach.sock` as root. For other users it is in a folder of their
    own: `$XDG_RUNTIME_DIR/kvstow` or, without that variable, `kvstow-node-UID` in the folder for temporary files."""
    if os.geteuid() == 0:
        return Path("/run/kvstow/attach.sock")
    runtime = environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "kvstow" if runtime else Path(tempfile.gettempdir()) / f"kvstow-node-{os.geteuid()}"
    return folder / "attach.sock"


def group_id(name: str) -> int:
    """The id of a group, which may be given as a number. Raises `ConfigError` for an unknown name."""
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise ConfigError("attach-group", name, "the name or the number of a group of this machine") from error


def _require_folder(folder: Path, group: int | None) -> None:
    """Create the folder, or check that no other user may replace files in it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir(0o700)  # nobody else may enter it before it belongs to the group
        except FileExistsError:
            found = folder.stat()
        else:
            if group is not None:
                os.chown(folder, -1, group)
            folder.chmod(FOLDER_MODE)
            return
    except OSError as error:
        raise ConflictError(f"cannot use the folder {folder}: {error.strerror or error}") from error
    whose = f"the folder {folder} belongs to uid {found.st_uid}"
    if found.st_uid in (0, os.geteuid()):
        if not found.st_mode & stat.S_IWOTH or found.st_mode & stat.S_ISVTX:
            return
        whose = f"the folder {folder} can be written by everybody (mode {stat.S_IMODE(found.st_mode):o})"
    raise ConflictError(
        f"{whose}, who could replace the socket in it: use a folder of its own, with mode {FOLDER_MODE:o}"
    )
