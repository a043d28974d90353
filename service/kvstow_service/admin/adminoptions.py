"""Options of the admin server that every host has, embedded or in the node service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstow.errors import ConfigError, SettingError
from kvstow_api.hostsettings import INFORMATIONAL_CHECKS, parse_host_names, require_token
from kvstow_api.regularfile import TokenFile
from kvstow_service.admin.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """Where the server listens and which credentials it accepts. Reads the files, but does not touch the network.

    `port`: 0 takes any free one. `token_file`: tokens for requests over TCP that change anything; without it or client
    certificates such requests are refused, and `host` must be a loopback address. `viewer_token_file`:
    tokens for reading; without it reading is open. `tls`: TCP connections use TLS. `readiness_require`: the
    informational checks that fail `/readyz`. `allowed_hosts`: host names, besides those of loopback, that a server on
    loopback accepts.

    Raises `ConfigError`.
    """

    host: str = "127.0.0.1"
    port: int = 9595
    token_file: Path | None = None
    viewer_token_file: Path | None = None
    tls: TlsFiles | None = None
    readiness_require: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.port) is not int or not 0 <= self.port < 1 << 16:
            raise ConfigError("port", self.port, "0 (any free port) to 65535")
        if not set(self.readiness_require) <= set(INFORMATIONAL_CHECKS):
            raise ConfigError("readiness_require", self.readiness_require, " and ".join(INFORMATIONAL_CHECKS))
        parse_host_names("allowed_hosts", self.allowed_hosts)
        require_token(self.host, self.token_file, certificates=self.has_certificates)
        for path in (self.token_file, self.viewer_token_file):
            if path is not None:
                TokenFile(path)
        if self.viewer_token_file is not None and self.token_file is None and not self.has_certificates:
            raise SettingError("viewer_token_file", self.viewer_token_file, "needs token_file or tls_client_ca")
        if self.tls is not None:
            self.tls.read()

    @property
    def has_certificates(self) -> bool:
        """Whether a client's certificate counts as an admin's token."""
        return self.tls is not None and self.tls.client_ca is not None
