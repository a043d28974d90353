"""Bearer tokens in a file. Imports no web framework, like `hostsettings`."""

from __future__ import annotations

import hmac
from pathlib import Path

from kvstow.errors import ConfigError, SettingError
from kvstow_api.regularfile import FileStamp, RegularFile, exposure

MAX_TOKENS = 100
"""Per file: each request is compared with all of them."""


class TokenFile:
    """The tokens in a file, one per line (two while one replaces the other).

    The constructor raises `ConfigError` if the file cannot be read or has no token. `renew` reads the file, which can
    take any time: call it off the event loop, and on one thread at a time. All else is fast.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: FileStamp | None = None
        self._tokens: tuple[bytes, ...] = ()
        self._problem: ConfigError | None = None
        self.renew()
        self._require()

    def renew(self) -> None:
        """Read the file if it has changed. Raises nothing: `accepts` raises what went wrong."""
        try:
            if FileStamp.of(self._path) == self._stamp:
                return
            read = RegularFile.read(self._path)
        except OSError as error:
            self._stamp = None
            self._problem = SettingError("token_file", str(self._path), f"cannot be read: {error.strerror}")
            return
        tokens = tuple(filter(None, map(bytes.strip, read.content.splitlines())))
        usable = 1 <= len(tokens) <= MAX_TOKENS and all(len(token.split()) == 1 for token in tokens)
        needed = f"must have 1 to {MAX_TOKENS} lines with one token each"
        self._problem = None if usable else SettingError("token_file", str(self._path), needed)
        self._tokens, self._stamp = tokens, read.stamp

    def accepts(self, token: bytes) -> bool:
        """Whether the file had this token when it was last read. Raises `ConfigError` if the file was not usable."""
        self._require()
        return sum(hmac.compare_digest(token, known) for known in self._tokens) > 0  # in constant time

    @property
    def exposure(self) -> str | None:
        """Describes the access that other users have to the file; None if they have none."""
        return None if self._stamp is None else exposure(self._stamp.mode)

    def _require(self) -> None:
        if self._problem is not None:
            raise self._problem
