"""The admin server's listening sockets."""

from __future__ import annotations

import errno
import grp
import os
import socket
import stat
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvstow.errors import ConfigError, ConflictError

_BACKLOG = 1024


class PortTakenError(ConflictError):
    """Another process listens on the port."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A numeric address to bind. The kernel chooses a free port in place of port 0."""

    family: socket.AddressFamily
    host: str
    port: int

    @classmethod
    def resolve(cls, host: str, port: int) -> TcpAddress:
        """Return the first address of `host`, IPv4 before IPv6. Raises `ConfigError` for an unknown name."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            raise ConfigError("host", host, f"an address or a name of this machine ({error})") from error
        family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        return cls(family, str(address[0]), port)


class AdminSockets:
    """Bound, listening sockets, at most one of them TCP, and the files of the Unix sockets.

    The sockets are opened by the constructor, or added later with `listen_tcp` and `listen_unix`. A call that fails
    changes nothing. The caller serves `sockets`. `close`, which is idempotent, closes them and removes the files. With
    `secure`, TCP clients use TLS.
    """

    def __init__(self, address: TcpAddress | None = None, *, secure: bool = False) -> None:
        """Raises `ConflictError` if another process listens on the port, or if this one may not."""
        self.sockets: list[socket.socket] = []
        self._tcp: TcpAddress | None = None
        self._scheme = "https" if secure else "http"
        self._files: dict[Path, FileId] = {}
        if address is not None:
            self.listen_tcp(address)

    def listen_tcp(self, address: TcpAddress) -> None:
        """Open the TCP socket. Call it at most once. Raises `ConflictError`, or its subclass `PortTakenError`."""
        listener = _bind_tcp(address)
        host, port = listener.getsockname()[:2]
        self._tcp = replace(address, host=host, port=port)
        self.sockets.append(listener)

    def listen_unix(self, path: Path, group: int | None = None) -> None:
        """Open a Unix socket of mode 0600, or 0660 for `group`. It replaces a file that a dead process has left. Raises
        `ConflictError`."""
        self.sockets.append(bind_unix(path, mode=0o600 if group is None else 0o660, group=group))
        self._files[path] = file_id(path)

    @property
    def host(self) -> str | None:
        """The numeric address of the TCP socket, or None without one."""
        return self._tcp.host if self._tcp else None

    @property
    def port(self) -> int:
        """The port of the TCP socket, or 0 without one."""
        return self._tcp.port if self._tcp else 0

    @property
    def url(self) -> str:
        """The server's URL on this machine. Raises `ConflictError` without a TCP socket."""
        if self._tcp is None:
            raise ConflictError("the admin server has no TCP address")
        loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return tcp_url(loopback.get(self._tcp.host, self._tcp.host), self._tcp.port, self._scheme)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which the server listens, for display."""
        tcp = [tcp_url(self._tcp.host, self._tcp.port, self._scheme)] if self._tcp else []
        return (*tcp, *(f"unix:{path}" for path in self._files))

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()
        # Remove only our own files: a successor may have replaced one.
        for path, bound in self._files.items():
            if bound is not None and file_id(path) == bound:
                with suppress(FileNotFoundError):
                    path.unlink()


def tcp_url(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_listening(path: Path) -> bool:
    """Whether a process listens on this Unix socket. Raises `OSError` if that cannot be determined."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


FileId = tuple[int, int] | None
"""Device and inode of a file. None if there is no file."""


def _bind_tcp(address: TcpAddress) -> socket.socket:
    # asyncio sets TCP_NODELAY only if the protocol is given. Without it, each kept-alive response waits 40 ms.
    listener = socket.socket(address.family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # With this option, a restart need not wait for the TIME_WAIT of old connections. Listen at once, because Linux
        # lets two sockets with the option bind a port until one of them listens.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        kind = PortTakenError if error.errno == errno.EADDRINUSE else ConflictError
        raise kind(f"cannot listen on {address.host}:{address.port}: {error.strerror}") from error
    return listener


def bind_unix(path: Path, *, mode: int, group: int | None = None) -> socket.socket:
    """Open a listening Unix socket of this mode and group. It replaces a file that a dead process has left. Raises
    `ConflictError`."""
    with ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            _remove_stale(path)
            listener.bind(str(path))
            # This comes before `listen`, so that no client can have connected yet.
            if group is not None:
                os.chown(path, -1, group)
            os.chmod(path, mode)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise ConflictError(f"cannot listen on unix:{path}: {error.strerror or error}") from error
        undo.pop_all()
    return listener


def require_folder(folder: Path, mode: int, group: int | None = None) -> None:
    """Create the folder with this mode and of this group, or check that no other user may replace files in it. Raises
    `ConflictError`."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir(0o700)  # only this user may enter the folder until it belongs to the group
        except FileExistsError:
            found, link = folder.stat(), folder.lstat()
        else:
            if group is not None:
                os.chown(folder, -1, group)
            folder.chmod(mode)
            return
    except OSError as error:
        raise ConflictError(f"cannot use the folder {folder}: {error.strerror or error}") from error
    mine = (0, os.geteuid())
    whose = f"the folder {folder} belongs to uid {found.st_uid}"
    if link.st_uid not in mine:  # the path is a symbolic link, and its owner could change where it leads
        whose = f"the folder {folder} belongs to uid {link.st_uid}"
    elif found.st_uid in mine:
        if not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or found.st_mode & stat.S_ISVTX:
            return
        who = "everybody" if found.st_mode & stat.S_IWOTH else f"the group {found.st_gid}"
        whose = f"the folder {folder} can be written by {who} (mode {stat.S_IMODE(found.st_mode):o})"
    raise ConflictError(f"{whose}, who could replace the socket in it: use a folder of its own, with mode {mode:o}")


def runtime_folder(name: str, shared_name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return a folder for sockets. For root it is `/run/NAME`. Other users have a folder of their own:
    `$XDG_RUNTIME_DIR/NAME` or, without that variable, `SHARED_NAME-UID` in the folder for temporary files."""
    if os.geteuid() == 0:
        return Path("/run") / name
    runtime = environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / name if runtime else Path(tempfile.gettempdir()) / f"{shared_name}-{os.geteuid()}"


def group_id(setting: str, name: str) -> int:
    """Return the id of a group, which is given by name or as a number. Raises `ConfigError` for an unknown name."""
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise ConfigError(setting, name, "the name or the number of a group of this machine") from error


def _remove_stale(path: Path) -> None:
    """Remove the socket of a dead process. Raises `ConflictError` for a live socket or any other file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConflictError(f"cannot listen on unix:{path}: the path exists and is not a socket")
    if is_listening(path):
        raise ConflictError(f"cannot listen on unix:{path}: another process is listening there")
    path.unlink(missing_ok=True)


def file_id(path: Path) -> FileId:
    """Return an id that changes if another file replaces this one."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
