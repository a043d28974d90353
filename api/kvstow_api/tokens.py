"""Bearer tokens in a file, and who must have one. A host checks them before it imports a web framework."""

from __future__ import annotations

import hmac
import ipaddress
from pathlib import Path

from kvstow.errors import ConfigError
from kvstow_api.filestamp import FileStamp
from kvstow_api.regularfile import RegularFile, exposure

MAX_TOKENS = 100
"""In one file; each request is compared with all of them."""


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
    """The tokens in a file, one a line (two while one replaces the other).

    Raises `ConfigError` when made if the file cannot be read or holds no token. `renew` reads the file, which may
    take any time: call it off the event loop, and on one thread at a time. All else is quick.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: FileStamp | None = None
        self._tokens: tuple[bytes, ...] = ()
        self._problem: ConfigError | None = None
        self.renew()
        self._require()

    def renew(self) -> None:
        """Read the file if it has changed. Raises nothing: `accepts` does."""
        try:
            if FileStamp.of(self._path) == self._stamp:
                return
            read = RegularFile.read(self._path)
        except OSError as error:
            self._stamp = None
            self._problem = ConfigError("token_file", str(self._path), f"a readable file ({error.strerror})")
            return
        tokens = tuple(filter(None, map(bytes.strip, read.content.splitlines())))
        usable = 1 <= len(tokens) <= MAX_TOKENS and all(len(token.split()) == 1 for token in tokens)
        allowed = f"a file with one token a line, 1 to {MAX_TOKENS} of them"
        self._problem = None if usable else ConfigError("token_file", str(self._path), allowed)
        self._tokens, self._stamp = tokens, read.stamp

    def accepts(self, token: bytes) -> bool:
        """Whether the file had this token when it was last read. Raises `ConfigError` if it could not be used."""
        self._require()
        return sum(hmac.compare_digest(token, known) for known in self._tokens) > 0  # compares with all of them

    @property
    def exposure(self) -> str | None:
        """Which other users may read or change the tokens, in words; None if none may."""
        return None if self._stamp is None else exposure(self._stamp.mode)

    def _require(self) -> None:
        if self._problem is not None:
            raise self._problem
