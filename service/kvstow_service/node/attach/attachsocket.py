"""The socket at which engines attach."""

from __future__ import annotations

import socket
from pathlib import Path

from kvstow_service.admin.sockets import bind_unix, file_id, require_folder

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
        require_folder(path.parent, FOLDER_MODE, group)
        self.listener: socket.socket = bind_unix(path, mode=SOCKET_MODE, group=group)
        self._file = file_id(path)

    def close(self) -> None:
        self.listener.close()
        if self._file is not None and file_id(self.path) == self._file:
            self.path.unlink(missing_ok=True)
        self._file = None
