"""The `kvstow` command: `serve`, `replay` and `trace` run on this machine, all others against a server.

The modules of this package import their dependencies when a command runs, so that the command line starts without
torch, FastAPI or pydantic.
"""

from __future__ import annotations

import click

import kvstow
from kvstow_service.cli.commands import LazyGroup


@click.group("kvstow", cls=LazyGroup)
@click.version_option(kvstow.__version__, prog_name="kvstow")
def app() -> None:
    """KV-cache offload for LLM inference: run, watch and control it."""


def main() -> None:
    """Entry point of the console script."""
    app()
