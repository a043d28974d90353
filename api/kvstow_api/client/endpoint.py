"""The address of a server, and the credentials for it."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from kvstow.errors import ConfigError, SettingError

DEFAULT_SERVER = "http://127.0.0.1:9595"

_ALLOWED = "http://HOST:PORT, https://HOST:PORT or unix:/PATH"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address, token and TLS settings of a server.

    `token_file` is read for each request, so a new token works at once. `tls` verifies the server, and may hold the
    client's certificate; None uses the system's trust store.
    """

    url: str
    uds: Path | None = None
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    tls: ssl.SSLContext | None = None

    @classmethod
    def parse(
        cls,
        server: str,
        *,
        token: str | None = None,
        token_file: Path | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Self:
        """From `http://HOST:PORT`, `https://HOST:PORT` or `unix:/PATH`. Raises `ConfigError`."""
        if token is not None and token_file is not None:
            raise SettingError("token_file", str(token_file), "cannot be combined with a token")
        if server.startswith("unix:"):
            path = server.removeprefix("unix:").removeprefix("//")
            if not path.startswith("/"):
                raise ConfigError("server", server, _ALLOWED)
            return cls("http://localhost", Path(path), token, token_file, tls)
        if not _is_url(server):
            raise ConfigError("server", server, _ALLOWED)
        return cls(server.rstrip("/"), None, token, token_file, tls)

    def credentials(self) -> Mapping[str, str]:
        """The header with the token, if there is one. Raises `ConfigError` if its file cannot be read."""
        token = self.token
        if self.token_file is not None:
            try:
                lines = self.token_file.read_text(encoding="latin-1").split()
            except OSError as error:
                raise ConfigError("token_file", str(self.token_file), f"a readable file ({error.strerror})") from None
            token = lines[0] if lines else None
        return {} if token is None else {"Authorization": f"Bearer {token}"}


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    plain = not (parts.query or parts.fragment or parts.username) and parts.path in ("", "/")
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and plain
