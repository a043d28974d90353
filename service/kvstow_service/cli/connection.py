"""How a command reaches its server: flags, environment variables and contexts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import click

from kvstow.errors import ConfigError
from kvstow_service import environment
from kvstow_service.cli.contexts import Context, ContextFile
from kvstow_service.cli.failures import reporting_failures
from kvstow_service.cli.valuetypes import TIME

if TYPE_CHECKING:
    import ssl

    from kvstow_api.client import Client, Endpoint


@dataclass(frozen=True, slots=True)
class Connection:
    """Where requests go. `name`: the context's, if one was used; `timeout`: seconds for each answer."""

    context: Context
    timeout: float
    name: str | None = None

    @classmethod
    def choose(cls, given: Context, name: str | None, environ: Mapping[str, str], *, timeout: float = 10.0) -> Self:
        """`given` by flags; what is missing comes from the environment and from the context `name` or the current one.

        A server given by flag or variable takes nothing from the current context. Raises `ConfigError`.
        """
        from kvstow_api.client.endpoint import DEFAULT_SERVER

        if given.server and name:
            raise ConfigError("--context", name, "a server or a context, not both")
        server = given.server or ("" if name else environ.get(environment.SERVER, ""))
        used, stored = None, Context(server or DEFAULT_SERVER)
        if not server:
            file = ContextFile.read(environ)
            used = name or environ.get(environment.CONTEXT) or file.current
            stored = file.get(used) if used else stored
        context = Context(
            server=stored.server,
            token_file=given.token_file or environ.get(environment.TOKEN_FILE) or stored.token_file,
            ca_file=given.ca_file or environ.get(environment.CA_FILE) or stored.ca_file,
            cert_file=given.cert_file or stored.cert_file,
            key_file=given.key_file or stored.key_file,
        )
        return cls(context, timeout, used)

    @property
    def server(self) -> str:
        """The server as people know it: its URL, and the context that names it."""
        return f"{self.context.server} (context {self.name})" if self.name else self.context.server

    def client(self) -> Client:
        """Raises `ConfigError` for a server or a file that cannot be used."""
        from kvstow_api.client import Client

        return Client(self._endpoint(), timeout=self.timeout)

    def _endpoint(self) -> Endpoint:
        from kvstow_api.client import Endpoint

        context = self.context
        token_file = Path(context.token_file) if context.token_file else None
        return Endpoint.parse(context.server, token_file=token_file, tls=_tls(context))


def _tls(context: Context) -> ssl.SSLContext | None:
    """None: the system's certificates."""
    if not (context.ca_file or context.cert_file or context.key_file):
        return None
    import ssl

    if context.key_file and not context.cert_file:
        raise ConfigError("--key-file", context.key_file, "only together with --cert-file")
    try:
        tls = ssl.create_default_context(cafile=context.ca_file)
        if context.cert_file:
            tls.load_cert_chain(context.cert_file, context.key_file)
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(filter(None, (context.ca_file, context.cert_file, context.key_file)))
        raise ConfigError("TLS files", files, f"valid PEM files ({error})") from error
    return tls


_FILE = click.Path(dir_okay=False)
_FLAGS = (
    click.option(
        "--server",
        metavar="URL",
        help="http://HOST:PORT, https://HOST:PORT or unix:/PATH. Default: KVSTOW_SERVER, then the current context, "
        "then http://127.0.0.1:9595.",
    ),
    click.option("--context", metavar="NAME", help="A server by its name in `kvstow context list`."),
    click.option("--token-file", type=_FILE, help="File with the bearer token. Default: KVSTOW_TOKEN_FILE."),
    click.option("--ca-file", type=_FILE, help="CA certificates instead of the system's. Default: KVSTOW_CA_FILE."),
    click.option("--cert-file", type=_FILE, help="Client certificate."),
    click.option("--key-file", type=_FILE, help="Key of the client certificate, if it is in another file."),
    click.option("--request-timeout", type=TIME, default="10s", show_default=True, help="Longest wait for one answer."),
)


def connection_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the flags that `Given` takes."""
    return functools.reduce(lambda function, flag: flag(function), reversed(_FLAGS), command)


class Given(NamedTuple):
    """The connection flags of a command; `context.server` is empty if no server is given."""

    context: Context
    name: str | None
    timeout: float

    @classmethod
    def take(cls, options: dict[str, Any]) -> Self:
        """Removes them from the command's options. Raises `ConfigError`."""
        timeout = options.pop("request_timeout")
        if not timeout:
            raise ConfigError("--request-timeout", timeout, "more than 0 seconds")
        files = {name: options.pop(name) for name in ("token_file", "ca_file", "cert_file", "key_file")}
        return cls(Context(options.pop("server") or "", **files), options.pop("context"), timeout)


def remote(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the connection flags to a command and passes it a `Connection` as its first argument. KVStow's errors become
    a message on standard error and an exit code."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        with reporting_failures():
            given = Given.take(options)
            command(Connection.choose(given.context, given.name, os.environ, timeout=given.timeout), **options)

    return connection_flags(run)
