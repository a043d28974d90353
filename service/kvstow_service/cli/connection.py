"""The parts that commands on a server share: how they reach it, which pool they mean, values with units, and the
question before destructive changes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from kvstow.bytesize import format_size, parse_size
from kvstow.errors import ConfigError
from kvstow_api.texts import counted
from kvstow_service import environment
from kvstow_service.cli.failures import CommandError, ExitCode, reporting_failures
from kvstow_service.cli.output import Format, emit
from kvstow_service.duration import parse_duration

if TYPE_CHECKING:
    import ssl

    from kvstow.status import SessionStatus
    from kvstow_api.answers import DeletedPoolView, PlanView, RemovedView
    from kvstow_api.client import Client


class _Parsed(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """A value that `parse` reads. Its `ConfigError` names the allowed values."""

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return value
        try:
            return self._parse(str(value))
        except ConfigError as error:
            self.fail(f"{error.value!r}; allowed: {error.allowed}", param, ctx)


TIME = _Parsed("time", parse_duration)
"""Seconds, as a float. Users write 30s, 500ms, 5m or 0.5."""

SIZE = _Parsed("size", parse_size)
"""Bytes, as an int. Users write 8GiB, 500MB or 4096."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The server to which requests go, and the credentials. `timeout` is in seconds for each answer."""

    server: str
    token_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    timeout: float = 10.0

    @classmethod
    def take(cls, options: dict[str, Any], environ: Mapping[str, str]) -> Self:
        """Make a connection from the connection flags, which are removed from the command's options. `environ` has the
        values that the flags do not give. Raises `ConfigError`."""
        from kvstow_api.client.client import DEFAULT_SERVER

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
        """Make a client. Without a credential, changes go through the Unix socket of a server on this machine, because
        it refuses them over TCP. Raises `ConfigError` for a server or a file that cannot be used."""
        from kvstow_api.client import Client, Endpoint
        from kvstow_service.cli.localserver import LocalServerClient

        token_file = Path(self.token_file) if self.token_file else None
        endpoint = Endpoint.parse(self.server, token_file=token_file, tls=self._tls())
        needs_socket = endpoint.uds is None and not (self.token_file or self.cert_file)
        return (LocalServerClient if needs_socket else Client)(endpoint, timeout=self.timeout)

    def _tls(self) -> ssl.SSLContext | None:
        """Return the TLS context. None means that the system's certificates are used."""
        if not (self.ca_file or self.cert_file or self.key_file):
            return None
        import ssl

        if self.key_file and not self.cert_file:
            raise ConfigError("--key-file", self.key_file, "only together with --cert-file")
        try:
            tls = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file:
                tls.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # includes ssl.SSLError
            files = ", ".join(filter(None, (self.ca_file, self.cert_file, self.key_file)))
            raise ConfigError("TLS files", files, f"valid PEM files ({error})") from error
        return tls


# -- pools and sessions -----------------------------------------------------------------------------------------------


pool_flag = click.option("--pool", metavar="NAME", help="The pool; needed only where the server has several.")


def chosen_pool(client: Client, name: str | None) -> str:
    """Return `name`, or the name of the only pool. Raises `CommandError` if there is no pool, or more than one."""
    from kvstow_api.client import routes

    if name is not None:
        return name
    names = [pool.name for pool in client.call(routes.list_pools).items]
    if not names:
        raise CommandError(
            "no engine has attached yet, so there is no pool",
            "`kvstow get sessions` lists the engines that are attached",
            ExitCode.CONFLICT,
        )
    if len(names) > 1:
        raise CommandError(f"the server has {len(names)} pools", f"give --pool: {', '.join(names)}", ExitCode.USAGE)
    return names[0]


def find_session(client: Client, session_id: str) -> SessionStatus:
    """Return the session. Raises `CommandError` if none has this id."""
    from kvstow_api.client import routes

    for session in client.call(routes.list_sessions).items:
        if session.id == session_id:
            return session
    raise CommandError(f"there is no session {session_id!r}", "`kvstow get sessions` lists them", ExitCode.NOT_FOUND)


# -- what a command gets ---------------------------------------------------------------------------------------------


yes_flag = click.option("--yes", "-y", is_flag=True, help="Proceed without a prompt.")
dry_run_flag = click.option("--dry-run", is_flag=True, help="Show what would happen, and change nothing.")


def evicted(plan: PlanView | RemovedView) -> str:
    """Say what the server evicts, or has evicted."""
    return f"{counted(plan.evicted_slots, 'block')}, {format_size(plan.evicted_bytes)} of each rank"


def in_store(removed: RemovedView | DeletedPoolView) -> str:
    """Say what was removed from the store below the pool, and what is left there. The text continues a sentence."""
    gone = f", and {counted(removed.stored_blocks, 'block')} in the store" if removed.stored_blocks else ""
    return gone + (f"; {removed.notice}" if removed.notice else "")


@dataclass(frozen=True, slots=True)
class Invocation:
    """A call of a command: its server, and the values of the flags that commands share, as far as it has them."""

    connection: Connection
    style: Format = "table"
    pool: str | None = None
    dry_run: bool = False
    yes: bool = False
    no_wait: bool = False

    def client(self) -> Client:
        return self.connection.client()

    def emit(self, view: Any, show: Callable[[Any], str]) -> None:
        """Print `view`. `show` makes the text for people."""
        emit(view, self.style, show)

    def confirm(self, effect: str, *, destructive: bool) -> None:
        """Return if the command may proceed. `effect` completes the sentence "this would ...". A command is destructive
        if it loses blocks, makes /readyz fail, or takes the cache from an engine. It first names its server in a
        question or, with --yes, in a line on standard error. Raises `CommandError` if the user answers no, or if there
        is no terminal to ask on."""
        if not destructive:
            return
        server = self.connection.server
        if self.yes:
            click.echo(f"server: {server}", err=True)
            return
        if not sys.stdin.isatty():
            raise CommandError(
                f"this would {effect} on {server}, and there is no terminal to confirm it on",
                "--yes proceeds without a prompt; --dry-run only shows what would happen",
                ExitCode.USAGE,
            )
        if not click.confirm(f"{effect[0].upper()}{effect[1:]} on {server}?", err=True):
            raise CommandError("nothing was changed", "--yes proceeds without a prompt")


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
_COMMON = ("style", "pool", "dry_run", "yes", "no_wait")


def remote(command: Callable[..., None]) -> Callable[..., None]:
    """Add the connection flags to a command, and pass it an `Invocation` as its first argument. KVStow's errors become
    a message on standard error and an exit code."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        with reporting_failures():
            connection = Connection.take(options, os.environ)
            common = {name: options.pop(name) for name in _COMMON if name in options}
            command(Invocation(connection, **common), **options)

    return functools.reduce(lambda function, flag: flag(function), reversed(_FLAGS), run)
