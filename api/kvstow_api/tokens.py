"""Bearer tokens in a file, and who must have one. A host checks them before it imports a web framework."""

from __future__ import annotations

import hmac
import ipaddress
from pathlib import Path

from kvstow.errors import ConfigError
from kvstow_api.filestamp import FileStamp


def require_token(host: str | None, token_file: Path | None, *, certificates: bool = False) -> None:
    """Raises `ConfigError` if `host` is reachable from outside, and neither a token nor client certificates guard it.
    None: a Unix socket."""
    if token_file is None and not certificates and host is not None and not is_loopback(host):
        raise ConfigError("token_file", None, f"a file with a token, because {host} is not a loopback address")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class TokenFile:
    """The tokens in a file, one a line (two while one replaces the other), read again when the file changes.

    Raises `ConfigError` when made if the file cannot be read or holds no token.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: FileStamp | None = None
        self._tokens: tuple[bytes, ...] = ()
        self._read()

    def accepts(self, token: bytes) -> bool:
        """Whether the file has this token now. Raises `ConfigError` if it has none any more."""
        return sum(hmac.compare_digest(token, known) for known in self._read()) > 0  # compares with all of them

    def _read(self) -> tuple[bytes, ...]:
        try:
            stamp = FileStamp.of(self._path)
            if stamp != self._stamp:
                self._tokens = tuple(filter(None, map(bytes.strip, self._path.read_bytes().splitlines())))
                self._stamp = stamp
        except OSError as error:
            raise ConfigError("token_file", str(self._path), f"a readable file ({error.strerror})") from None
        if not self._tokens or any(len(token.split()) > 1 for token in self._tokens):
            raise ConfigError("token_file", str(self._path), "a file with one token a line, and at least one")
        return self._tokens
