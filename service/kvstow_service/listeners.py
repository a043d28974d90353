"""The sockets of the admin server, bound and listening before anything slow starts."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from kvstow.errors import ConfigError, ConflictError

_BACKLOG = 1024
_UDS_MODE = 0o600


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A numeric address to bind; port 0 means any free one."""

    family: socket.AddressFamily
    host: str
    port: int

    @classmethod
    def resolve(cls, host: str, port: int) -> TcpAddress:
        """The first address of `host`, IPv4 before IPv6. Raises `ConfigError` for an unknown name."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            raise ConfigError("host", host, f"an address or a name of this machine ({error})") from error
        family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        return cls(family, str(address[0]), port)


class Listeners:
    """Bound, listening sockets and, with a Unix socket, its file. `close` is idempotent.

    `url` reaches the server over TCP from this machine; `uds` is the Unix socket's path or None.
    """

    def __init__(self, address: TcpAddress, uds: Path | None) -> None:
        """Raises `ConflictError` for a port or a path that is taken or may not be used."""
        self.uds = uds
        self._uds_file: tuple[int, int] | None = None
        with ExitStack() as undo:
            tcp = undo.enter_context(_bind_tcp(address))
            self.host, self.port = tcp.getsockname()[:2]
            self.sockets = [tcp]
            if uds is not None:
                self.sockets.append(undo.enter_context(_bind_uds(uds)))
                self._uds_file = _file_id(uds)
            undo.pop_all()

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def addresses(self) -> list[str]:
        """For people: where the server listens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return [f"http://{host}:{self.port}", *([f"unix:{self.uds}"] if self.uds else [])]

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()
        # A successor may have replaced the file already: that one is not ours to remove.
        if self.uds is not None and self._uds_file is not None and _file_id(self.uds) == self._uds_file:
            with suppress(FileNotFoundError):
                self.uds.unlink()
        self._uds_file = None


def _bind_tcp(address: TcpAddress) -> socket.socket:
    # Only with the protocol named does asyncio set TCP_NODELAY; without it each kept-alive answer waits 40 ms.
    listener = socket.socket(address.family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # A restart must not wait for the old connections' TIME_WAIT. Listening at once matters: Linux lets two
        # sockets with this option share a port until one of them listens.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConflictError(f"cannot listen on {address.host}:{address.port}: {error.strerror}") from error
    return listener


def _bind_uds(path: Path) -> socket.socket:
    with ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            _remove_stale(path)
            listener.bind(str(path))
            os.chmod(path, _UDS_MODE)  # before listen: nobody can have connected
            listener.listen(_BACKLOG)
        except OSError as error:
            raise ConflictError(f"cannot listen on unix:{path}: {error.strerror or error}") from error
        undo.pop_all()
    return listener


def _remove_stale(path: Path) -> None:
    """Remove what a killed process left; raises `ConflictError` for a live socket or any other file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConflictError(f"cannot listen on unix:{path}: the path exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise ConflictError(f"cannot listen on unix:{path}: another process is listening there")


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
