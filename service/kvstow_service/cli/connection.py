"""How a command gets to its server: the flags that all of them have, the environment, and contexts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstow.errors import ConfigError
from kvstow_service import environment
from kvstow_service.cli.contextfile import Context, ContextFile
from kvstow_service.cli.exits import complaining
from kvstow_service.cli.values import TIME

if TYPE_CHECKING:
    import ssl

    from kvstow_api.client import Client, Endpoint


@dataclass(frozen=True, slots=True)
class Connection:
    """Where requests go. `timeout`: seconds for each answer."""

    context: Context
    timeout: float

    def client(self) -> Client:
        """Raises `ConfigError` for a server or a file that cannot be used."""
        from kvstow_api.client import Client

        return Client(self._endpoint(), timeout=self.timeout)

    def _endpoint(self) -> Endpoint:
        from kvstow_api.client import Endpoint

        context = self.context
        token_file = Path(context.token_file) if context.token_file else None
        return Endpoint.parse(context.server, token_file=token_file, tls=_tls(context))


def chosen(given: Context, name: str | None, environ: Mapping[str, str]) -> Context:
    """`given` by flags, what is missing from the environment and from the context `name`, or the current one.

    A server that is given by flag or variable takes nothing from the current context. Raises `ConfigError`.
    """
    from kvstow_api.client.endpoint import DEFAULT_SERVER

    if given.server and name:
        raise ConfigError("--context", name, "a server or a context, not both")
    server = given.server or ("" if name else environ.get(environment.SERVER, ""))
    stored = Context(server or DEFAULT_SERVER) if server else _stored(name, environ) or Context(DEFAULT_SERVER)
    return Context(
        server=stored.server,
        token_file=given.token_file or environ.get(environment.TOKEN_FILE) or stored.token_file,
        ca_file=given.ca_file or environ.get(environment.CA_FILE) or stored.ca_file,
        cert_file=given.cert_file or stored.cert_file,
        key_file=given.key_file or stored.key_file,
    )


def _stored(name: str | None, environ: Mapping[str, str]) -> Context | None:
    file = ContextFile.read(environ)
    wanted = name or environ.get(environment.CONTEXT) or file.current
    return file.get(wanted) if wanted else None


def _tls(context: Context) -> ssl.SSLContext | None:
    """None trusts what the system trusts."""
    if not (context.ca_file or context.cert_file or context.key_file):
        return None
    import ssl

    if context.key_file and not context.cert_file:
        raise ConfigError("--key-file", context.key_file, "a file only beside a --cert-file")
    try:
        tls = ssl.create_default_context(cafile=context.ca_file)
        if context.cert_file:
            tls.load_cert_chain(context.cert_file, context.key_file)
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(filter(None, (context.ca_file, context.cert_file, context.key_file)))
        raise ConfigError("TLS files", files, f"PEM files that can be used ({error})") from error
    return tls


_FILE = click.Path(dir_okay=False)
_FLAGS = (
    click.option(
        "--server",
        metavar="URL",
        help="http://HOST:PORT, https://HOST:PORT or unix:/PATH; else KVSTOW_SERVER, else the current context, "
        "else http://127.0.0.1:9595.",
    ),
    click.option("--context", metavar="NAME", help="A server by the name that `kvstow context set` gave it."),
    click.option("--token-file", type=_FILE, help="File with the bearer token; else KVSTOW_TOKEN_FILE."),
    click.option("--ca-file", type=_FILE, help="Certificates to trust in place of the system's; else KVSTOW_CA_FILE."),
    click.option("--cert-file", type=_FILE, help="Certificate to show the server."),
    click.option("--key-file", type=_FILE, help="Its key, if it is in a file of its own."),
    click.option(
        "--request-timeout", type=TIME, default="10s", show_default=True, help="How long one answer may take."
    ),
)


def remote(command: Callable[..., None]) -> Callable[..., None]:
    """A command that asks a server: its first argument is a `Connection`, made of flags that it gets beside its own.

    What it raises of KVStow's errors becomes words on standard error and an exit code.
    """

    @functools.wraps(command)
    def run(
        *,
        server: str | None,
        context: str | None,
        token_file: str | None,
        ca_file: str | None,
        cert_file: str | None,
        key_file: str | None,
        request_timeout: float,
        **own: Any,
    ) -> None:
        with complaining():
            if not request_timeout:
                raise ConfigError("--request-timeout", request_timeout, "more than 0 seconds")
            given = Context(server or "", token_file, ca_file, cert_file, key_file)
            command(Connection(chosen(given, context, os.environ), request_timeout), **own)

    return functools.reduce(lambda function, flag: flag(function), reversed(_FLAGS), run)
