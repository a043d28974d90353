"""Where a Redis or Valkey is, as the URL of a setting says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstow.errors import ConfigError

SCHEMES = ("redis", "rediss")
FORM = "redis://[USER@]HOST:PORT, or rediss:// for TLS, with options such as ?password_file=FILE"

_OPTIONS = ("ca_file", "certificate_file", "key_file", "password_file")


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """A server, and how to log in. Files are read at each connect, so they may change."""

    host: str
    port: int
    user: str | None = None
    password_file: Path | None = None
    is_tls: bool = False
    ca_file: Path | None = None
    """Of the authorities that may have signed the server's certificate; None: those of the system."""
    certificate_file: Path | None = None
    key_file: Path | None = None

    @classmethod
    def parse(cls, url: str) -> RedisLocation:
        """Raises `ConfigError`, which names the part that is wrong and never repeats
        a password."""
        try:
            parts = urlsplit(url)
            host, port, password = parts.hostname, parts.port, parts.password
            given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise ConfigError("tier", url.rpartition("@")[2], FORM) from None
        if password is not None:
            raise ConfigError("tier", "a URL with a password", "a password in a file, with ?password_file=FILE")
        if parts.scheme not in SCHEMES or not host or not port or parts.path not in ("", "/") or parts.fragment:
            raise ConfigError("tier", url, FORM)
        options: dict[str, Path] = {}
        for name, value in given:
            if name not in _OPTIONS:
                raise ConfigError(f"tier option {name}", value, f"only the options {', '.join(_OPTIONS)}")
            if name in options or not value:
                raise ConfigError(f"tier option {name}", value, "the path of a file, once")
            options[name] = Path(value)
        is_tls = parts.scheme == "rediss"
        for name in ("ca_file", "certificate_file", "key_file"):
            if name in options and not is_tls:
                raise ConfigError(f"tier option {name}", str(options[name]), "files of TLS, with rediss://")
        if ("certificate_file" in options) != ("key_file" in options):
            raise ConfigError("tier", url, "certificate_file and key_file together")
        user = unquote(parts.username) if parts.username else None
        if user and "password_file" not in options:
            raise ConfigError("tier", url, "a user with ?password_file=FILE")
        return cls(host, port, user, is_tls=is_tls, **options)

    def password(self) -> str | None:
        """Raises `OSError`."""
        return None if self.password_file is None else self.password_file.read_text().strip()

    def __str__(self) -> str:
        return f"{'rediss' if self.is_tls else 'redis'}://{self.host}:{self.port}"
