"""The `kvstow` command. Each subcommand is a module of this package that imports its machinery when it runs,
so that the command line itself starts without torch or FastAPI."""

from __future__ import annotations

import typer

from kvstow_service.cli import replay, serve, trace

app = typer.Typer(name="kvstow", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("serve")(serve.serve)
app.command("replay")(replay.replay)
app.add_typer(trace.app, name="trace")


def main() -> None:
    """Entry point of the console script."""
    app()
