"""Settings of a host that are checked before a web framework is loaded, and the files that these settings name."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import re
import stat
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Self

from kvstow.errors import ConfigError, SettingError

INFORMATIONAL_CHECKS = ("pool", "pinned")
"""Checks that fail `/readyz` only if the host requires them."""


class CertificateState(NamedTuple):
    """The server's own certificate. `ends` is when it expires, in seconds since the epoch. `is_outdated` says that
    newer files are there, and cannot be used."""

    ends: float
    is_outdated: bool = False


_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")

MAX_FILE_BYTES = 1 << 20
"""The limit for a file, in bytes. It is enough for any list of tokens or chain of certificates."""
MAX_TOKENS = 100
"""The limit for the tokens of a file. Each request is compared with all of them."""
_LONGEST_READ_SECONDS = 1.0
"""How long a caller waits for another thread that reads the tokens. Reading takes less than a millisecond."""


def parse_host_names(key: str, value: object) -> tuple[str, ...]:
    """Parse a list, or text whose names are separated by commas or spaces. Raises `ConfigError`."""
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(
        isinstance(name, str) and _NAME.fullmatch(name) for name in names
    ):
        raise ConfigError(key, value, "a list of host names without ports")
    return tuple(normal_host(name) for name in names)


def normal_host(name: str) -> str:
    return name.lower().removesuffix(".")


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_token(host: str | None, token_file: Path | None, *, certificates: bool = False) -> None:
    """Raise `SettingError` if other machines can reach `host`, and neither a token nor a client certificate is
    required. `host` is None for a Unix socket."""
    if token_file is None and not certificates and host is not None and not is_loopback(host):
        raise SettingError("host", host, "is reachable from other machines: set token_file or tls_client_ca")


class FileStamp(NamedTuple):
    """Identifies one version of a file's content and permissions."""

    inode: int
    mtime_ns: int
    size: int
    mode: int

    @classmethod
    def of(cls, path: Path | int) -> Self:
        status = os.stat(path)
        return cls(status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)


def read_regular_file(path: Path) -> tuple[bytes, FileStamp]:
    """Return the content of a file, and the stamp of that version. It blocks only on the file system. Raises `OSError`,
    also for a file that is not regular or is larger than `MAX_FILE_BYTES`."""
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        stamp = FileStamp.of(descriptor)
        if not stat.S_ISREG(stamp.mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MAX_FILE_BYTES} bytes", str(path))
    return content, stamp


def exposure(mode: int) -> str | None:
    """Describe the access that other users have to a file of this mode. Returns None if they have none.

    The group may read the file, because this is how Kubernetes passes a Secret to a container that does not run as
    root.
    """
    readable, writable = mode & stat.S_IROTH, mode & (stat.S_IWOTH | stat.S_IWGRP)
    if not readable and not writable:
        return None
    what = " and ".join(word for word, given in (("read", readable), ("change", writable)) if given)
    return f"other users may {what} it (mode {stat.S_IMODE(mode):04o})"


class TokenFile:
    """The tokens in a file, one on each line. There are two while one replaces the other.

    The constructor raises `ConfigError` if the file cannot be read or has no token. `renew` reads the file, which can
    take any time, so call it off the event loop. All other methods are fast.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: FileStamp | None = None
        self._tokens: tuple[bytes, ...] = ()
        self._renewing = Lock()
        self.problem: str | None = None
        """A sentence that says why the file cannot be used, without its path. None if it can be used."""
        self.renew()
        self._require()

    def renew(self) -> None:
        """Read the file if it has changed. If another thread is reading it, this waits a moment, because that thread
        may have begun before the change. If the file system hangs, the tokens stay as they are. Raises nothing:
        `accepts` raises the error."""
        if self._renewing.acquire(timeout=_LONGEST_READ_SECONDS):
            try:
                self._renew()
            finally:
                self._renewing.release()

    def _renew(self) -> None:
        try:
            if FileStamp.of(self._path) == self._stamp:
                return
            content, stamp = read_regular_file(self._path)
        except OSError as error:
            self._stamp = None
            self.problem = f"cannot be read: {error.strerror}"
            return
        tokens = tuple(filter(None, map(bytes.strip, content.splitlines())))
        usable = 1 <= len(tokens) <= MAX_TOKENS and all(len(token.split()) == 1 for token in tokens)
        self.problem = None if usable else f"must have 1 to {MAX_TOKENS} lines with one token each"
        self._tokens, self._stamp = tokens, stamp

    def accepts(self, token: bytes) -> bool:
        """Whether the file had this token when it was last read. Raises `ConfigError` if the file was not usable."""
        self._require()
        return sum(hmac.compare_digest(token, known) for known in self._tokens) > 0  # in constant time

    @property
    def exposure(self) -> str | None:
        """Describes the access that other users have to the file. None if they have none."""
        return None if self._stamp is None else exposure(self._stamp.mode)

    def _require(self) -> None:
        if self.problem is not None:
            raise SettingError("token_file", str(self._path), self.problem)
