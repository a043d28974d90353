"""The `kvstow` command: `serve`, `replay` and `trace` on this machine, all others against a server.

Each subcommand is a module of this package that imports its machinery when it runs, so that the command line itself
starts without torch, FastAPI or pydantic.
"""

from __future__ import annotations

import click

import kvstow
from kvstow_service.cli.commands import LazyGroup


@click.group("kvstow", cls=LazyGroup)
@click.version_option(kvstow.__version__, prog_name="kvstow")
def app() -> None:
    """KV-cache offload for LLM inference: run it, see it, steer it."""


def main() -> None:
    """Entry point of the console script."""
    app()
