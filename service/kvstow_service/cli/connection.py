"""How a command reaches its server: flags and environment variables."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from kvstow.errors import ConfigError
from kvstow_service import environment
from kvstow_service.cli.failures import reporting_failures
from kvstow_service.cli.valuetypes import TIME

if TYPE_CHECKING:
    import ssl

    from kvstow_api.client import Client


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Where requests go, and with which credentials. `timeout`: seconds for each answer."""

    server: str
    token_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    timeout: float = 10.0

    @classmethod
    def take(cls, options: dict[str, Any], environ: Mapping[str, str]) -> Self:
        """Removes the connection flags from the command's options; `environ` has what they do not give. Raises
        `ConfigError`."""
        from kvstow_api.client.endpoint import DEFAULT_SERVER

        timeout = options.pop("request_timeout")
        if not timeout:
            raise ConfigError("--request-timeout", timeout, "more than 0 seconds")
        return cls(
            server=options.pop("server") or environ.get(environment.SERVER) or DEFAULT_SERVER,
            token_file=options.pop("token_file") or environ.get(environment.TOKEN_FILE) or None,
            ca_file=options.pop("ca_file") or environ.get(environment.CA_FILE) or None,
            cert_file=options.pop("cert_file"),
            key_file=options.pop("key_file"),
            timeout=timeout,
        )

    def client(self) -> Client:
        """Without a credential, changes go through the Unix socket of a server on this machine: over TCP it refuses
        them. Raises `ConfigError` for a server or a file that cannot be used."""
        from kvstow_api.client import Client, Endpoint
        from kvstow_service.cli.localserver import LocalServerClient

        token_file = Path(self.token_file) if self.token_file else None
        endpoint = Endpoint.parse(self.server, token_file=token_file, tls=self._tls())
        needs_socket = endpoint.uds is None and not (self.token_file or self.cert_file)
        return (LocalServerClient if needs_socket else Client)(endpoint, timeout=self.timeout)

    def _tls(self) -> ssl.SSLContext | None:
        """None: the system's certificates."""
        if not (self.ca_file or self.cert_file or self.key_file):
            return None
        import ssl

        if self.key_file and not self.cert_file:
            raise ConfigError("--key-file", self.key_file, "only together with --cert-file")
        try:
            tls = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file:
                tls.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # ssl.SSLError is one
            files = ", ".join(filter(None, (self.ca_file, self.cert_file, self.key_file)))
            raise ConfigError("TLS files", files, f"valid PEM files ({error})") from error
        return tls


_FILE = click.Path(dir_okay=False)
_FLAGS = (
    click.option(
        "--server",
        metavar="URL",
        help="http://HOST:PORT, https://HOST:PORT or unix:/PATH. Default: KVSTOW_SERVER, then http://127.0.0.1:9595.",
    ),
    click.option("--token-file", type=_FILE, help="File with the bearer token. Default: KVSTOW_TOKEN_FILE."),
    click.option("--ca-file", type=_FILE, help="CA certificates instead of the system's. Default: KVSTOW_CA_FILE."),
    click.option("--cert-file", type=_FILE, help="Client certificate."),
    click.option("--key-file", type=_FILE, help="Key of the client certificate, if it is in another file."),
    click.option("--request-timeout", type=TIME, default="10s", show_default=True, help="Longest wait for one answer."),
)


def remote(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the connection flags to a command and passes it a `Connection` as its first argument. KVStow's errors become
    a message on standard error and an exit code."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        with reporting_failures():
            command(Connection.take(options, os.environ), **options)

    return functools.reduce(lambda function, flag: flag(function), reversed(_FLAGS), run)
