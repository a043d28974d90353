"""`kvstow context`: names for servers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import click

from kvstow_service.cli.contextfile import Context, ContextFile, check_name
from kvstow_service.cli.exits import complaining
from kvstow_service.cli.output import Column, print_table

_FILE = click.Path(exists=True, dir_okay=False)


@click.group()
def context() -> None:
    """Give servers names, and choose the one that commands ask."""


@context.command("list")
def list_contexts() -> None:
    """All names; * marks the current one."""
    with complaining():
        file = ContextFile.read(os.environ)
    columns = (
        Column("CURRENT", lambda name: "*" if name == file.current else ""),
        Column("NAME", str),
        Column("SERVER", lambda name: file.contexts[name].server),
        Column("TOKEN FILE", lambda name: file.contexts[name].token_file or "-"),
    )
    print_table(sorted(file.contexts), columns)


@context.command("set")
@click.argument("name")
@click.option("--server", required=True, metavar="URL", help="http://HOST:PORT, https://HOST:PORT or unix:/PATH.")
@click.option("--token-file", type=_FILE, help="File with the bearer token.")
@click.option("--ca-file", type=_FILE, help="Certificates to trust in place of the system's.")
@click.option("--cert-file", type=_FILE, help="Certificate to show the server.")
@click.option("--key-file", type=_FILE, help="Its key, if it is in a file of its own.")
def set_context(name: str, server: str, **files: str | None) -> None:
    """Call a server NAME. The first name becomes the current one."""
    from kvstow_api.client import Endpoint

    with complaining():
        Endpoint.parse(server)
        file = ContextFile.read(os.environ)
        paths = {key: str(Path(path).absolute()) if path else None for key, path in files.items()}
        contexts = {**file.contexts, check_name(name): Context(server, **paths)}
        replace(file, contexts=contexts, current=file.current or name).write()
    click.echo(f"{name} is {server}")


@context.command()
@click.argument("name")
def use(name: str) -> None:
    """Make NAME the one that commands ask."""
    with complaining():
        file = ContextFile.read(os.environ)
        server = file.get(name).server
        replace(file, current=name).write()
    click.echo(f"commands ask {name}, {server}")


@context.command()
@click.argument("name")
def delete(name: str) -> None:
    """Forget NAME."""
    with complaining():
        file = ContextFile.read(os.environ)
        file.get(name)
        contexts = {other: context for other, context in file.contexts.items() if other != name}
        replace(file, contexts=contexts, current=None if file.current == name else file.current).write()
    click.echo(f"{name} is forgotten")
