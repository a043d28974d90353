"""Where a Redis or Valkey is, as the URL of a setting says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstow.errors import ConfigError, SettingError, TierUnavailableError
from kvstow_api.regularfile import RegularFile

SCHEMES = ("redis", "rediss")
FORM = "redis://[USER@]HOST:PORT, or rediss:// for TLS, with options such as ?password_file=FILE"

_OPTIONS = ("ca_file", "certificate_file", "key_file", "password_file")


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """A server, and how to log in. Files are read for each connection, because passwords and certificates change."""

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

    def check_files(self) -> None:
        """Raises `SettingError` for a file that cannot be read."""
        for option in _OPTIONS:
            try:
                self._read(option)
            except OSError as error:
                name = f"tier option {option}"
                raise SettingError(name, getattr(self, option), f"cannot be read: {error.strerror}") from None

    def content(self, option: str) -> bytes | None:
        """Of the file that an option names; None without the option. Raises `TierUnavailableError`, which does not name
        the file: every reader of the admin API sees it."""
        try:
            return self._read(option)
        except OSError as error:
            raise TierUnavailableError(f"{self}: {option} cannot be read: {error.strerror}") from None

    def password(self) -> str | None:
        """Raises `TierUnavailableError`."""
        content = self.content("password_file")
        try:
            return None if content is None else content.decode().strip()
        except UnicodeDecodeError:
            raise TierUnavailableError(f"{self}: password_file is not text") from None

    def _read(self, option: str) -> bytes | None:
        path: Path | None = getattr(self, option)
        return None if path is None else RegularFile.read(path).content

    def __str__(self) -> str:
        return f"{'rediss' if self.is_tls else 'redis'}://{self.host}:{self.port}"
