"""Contexts, the names that a user gives to servers: the file that keeps them, and `kvstow context`.

current = "prod"

[contexts.prod]
server = "https://kvstow.example.com:9595"
token_file = "/home/me/.kvstow-token"
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import click

from kvstow.errors import ConfigError
from kvstow_service.cli.failures import reporting_failures
from kvstow_service.cli.output import Column, table
from kvstow_service.environment import CONTEXTS

_NAMES = "letters, digits, - and _"
_FILE = click.Path(exists=True, dir_okay=False)


@dataclass(frozen=True, slots=True)
class Context:
    """A server and its credentials. Paths are absolute."""

    server: str
    token_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


@dataclass(frozen=True, slots=True)
class ContextFile:
    """The contents of the file; empty if there is none."""

    path: Path
    contexts: Mapping[str, Context] = field(default_factory=dict)
    current: str | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self:
        """The file that the environment names, or the user's own. Raises `ConfigError` for an invalid one."""
        path = _path(environ)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError) as error:
            raise ConfigError(CONTEXTS, str(path), f"a TOML file ({error})") from error
        known = {"current", "contexts"}
        tables = values.get("contexts", {})
        if not set(values) <= known or not isinstance(tables, dict):
            raise ConfigError(f"{path}", sorted(values), "current, and one table [contexts.NAME] per server")
        contexts = {name: _context(f"{path}: contexts.{name}", table) for name, table in tables.items()}
        return cls(path, contexts, values.get("current"))

    def get(self, name: str) -> Context:
        """Raises `ConfigError` for a name that is not in the file."""
        if name not in self.contexts:
            there = ", ".join(sorted(self.contexts)) or "none yet; `kvstow context set` adds one"
            raise ConfigError("context", name, there)
        return self.contexts[name]

    def write(self) -> None:
        """Replace the file. Raises `ConfigError` if that fails."""
        lines = [f"current = {json.dumps(self.current)}"] if self.current else []
        for name, context in self.contexts.items():
            lines += ["", f"[contexts.{name}]"]
            # A JSON string without \u escapes is also a TOML string.
            lines += [
                f"{key} = {json.dumps(text, ensure_ascii=False)}" for key, text in asdict(context).items() if text
            ]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as new:
                new.write("\n".join(lines) + "\n")
            os.replace(new.name, self.path)
        except OSError as error:
            raise ConfigError(CONTEXTS, str(self.path), f"a writable file ({error.strerror})") from error


def check_name(name: str) -> str:
    """Returns `name`. Raises `ConfigError` if it is not a valid name."""
    if not name or not all(char.isascii() and (char.isalnum() or char in "-_") for char in name):
        raise ConfigError("context", name, _NAMES)
    return name


@click.group()
def context() -> None:
    """Name servers, and choose the one that commands use."""


@context.command("list")
def list_contexts() -> None:
    """List the contexts; * marks the current one."""
    with reporting_failures():
        file = ContextFile.read(os.environ)
    columns = (
        Column("CURRENT", lambda name: "*" if name == file.current else ""),
        Column("NAME", str),
        Column("SERVER", lambda name: file.contexts[name].server),
        Column("TOKEN FILE", lambda name: file.contexts[name].token_file or "-"),
    )
    click.echo(table(sorted(file.contexts), columns))


@context.command("set")
@click.argument("name")
@click.option("--server", required=True, metavar="URL", help="http://HOST:PORT, https://HOST:PORT or unix:/PATH.")
@click.option("--token-file", type=_FILE, help="File with the bearer token.")
@click.option("--ca-file", type=_FILE, help="CA certificates instead of the system's.")
@click.option("--cert-file", type=_FILE, help="Client certificate.")
@click.option("--key-file", type=_FILE, help="Key of the client certificate, if it is in another file.")
def set_context(name: str, server: str, **files: str | None) -> None:
    """Give a server a NAME. The first context becomes the current one."""
    from kvstow_api.client import Endpoint

    with reporting_failures():
        Endpoint.parse(server)
        file = ContextFile.read(os.environ)
        paths = {key: str(Path(path).absolute()) if path else None for key, path in files.items()}
        contexts = {**file.contexts, check_name(name): Context(server, **paths)}
        replace(file, contexts=contexts, current=file.current or name).write()
    click.echo(f"{name} is {server}")


@context.command()
@click.argument("name")
def use(name: str) -> None:
    """Make NAME the current context."""
    with reporting_failures():
        file = ContextFile.read(os.environ)
        server = file.get(name).server
        replace(file, current=name).write()
    click.echo(f"current context: {name}, {server}")


@context.command()
@click.argument("name")
def delete(name: str) -> None:
    """Delete the context NAME."""
    with reporting_failures():
        file = ContextFile.read(os.environ)
        file.get(name)
        contexts = {other: context for other, context in file.contexts.items() if other != name}
        replace(file, contexts=contexts, current=None if file.current == name else file.current).write()
    click.echo(f"{name} is deleted")


def _path(environ: Mapping[str, str]) -> Path:
    if environ.get(CONTEXTS):
        return Path(environ[CONTEXTS])
    home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config"
    return Path(home) / "kvstow" / "contexts.toml"


def _context(where: str, table: Any) -> Context:
    known = [one.name for one in fields(Context)]
    given = table if isinstance(table, dict) else {}
    if "server" not in given or not set(given) <= set(known) or not all(isinstance(one, str) for one in given.values()):
        raise ConfigError(where, table, f"strings named {', '.join(known)}; server is required")
    return Context(**given)
