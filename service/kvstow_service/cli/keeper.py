"""`kvstow keeper`: runs the keeper in a separate process or container."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kvstow.errors import ConfigError
from kvstow_service.cli.failures import reporting_failures
from kvstow_service.duration import parse_duration
from kvstow_service.node.survival.keeperclient import keeper_command


@click.command()
@click.option("--state", required=True, metavar="FOLDER", help="The folder of `kvstow serve --state`, with mode 0700.")
@click.option(
    "--keep-timeout",
    default="10min",
    show_default=True,
    help="How long to hold the memory without a service, such as 30s or 1h.",
)
def keeper(state: str, keep_timeout: str) -> None:
    """Hold the memory of the node service while the service restarts.

    `kvstow serve --no-start-keeper` finds this process by the folder, and starts no keeper itself. If this process has
    a container or pod of its own, the memory survives the service's. The keeper runs until SIGTERM, and serves one
    service after the other.
    """
    with reporting_failures():
        seconds = parse_duration(keep_timeout, "--keep-timeout")
        if not seconds:
            raise ConfigError("--keep-timeout", keep_timeout, "more than 0 seconds")
    command, environ = keeper_command(Path(state).absolute(), seconds, "--stay")
    os.execve(command[0], command, environ)  # replaces this process, because a keeper has a quarter of its size
