"""`kvstow config`: the server's settings."""

from __future__ import annotations

import json
from typing import Any

import click

from kvstow_api.numberformat import counted
from kvstow_service.cli.asking import ask, dry_run_flag, yes_flag
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.details import details_of
from kvstow_service.cli.output import Format, emit, format_flag, print_pairs, print_table
from kvstow_service.cli.values import TIME
from kvstow_service.cli.work import no_wait_flag, patience, run


@click.group()
def config() -> None:
    """Show and change the server's settings."""


@config.command()
@format_flag
@remote
def view(connection: Connection, style: Format) -> None:
    """What can be changed now, and what the server was started with."""
    from kvstow_api.client import calls

    with connection.client() as client:
        emit(client.send(calls.config()), style, lambda view: print_pairs(details_of(view)))


@config.command("set")
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@dry_run_flag
@yes_flag
@no_wait_flag
@format_flag
@remote
def set_values(
    connection: Connection, settings: tuple[str, ...], dry_run: bool, yes: bool, no_wait: bool, style: Format
) -> None:
    """Change what can be changed while the server runs: capacity_slots, policy, pinning_paused."""
    from kvstow_api.client import calls

    runtime = dict(_parse(setting) for setting in settings)
    with connection.client() as client:
        etag = client.send(calls.config()).etag
        plan = client.send(calls.plan_config(runtime))
        if dry_run:
            emit(plan, style, lambda view: print_pairs(details_of(view)))
            return
        if plan.evicted_slots:
            ask(f"change {', '.join(runtime)}, which evicts {counted(plan.evicted_slots, 'block')}", yes)
        change = calls.change_config(runtime, if_match=etag, wait=patience(no_wait))
        answer = run(client, change, no_wait=no_wait)
        emit(answer, style, lambda view: print_pairs(details_of(getattr(view, "runtime", view))))


@config.command("log-level")
@click.argument("level")
@click.option("--logger", default="kvstow", show_default=True, help="`kvstow get log-levels` lists them.")
@click.option("--ttl", type=TIME, help="For so long; until the server ends if it is left out.")
@format_flag
@remote
def log_level(connection: Connection, level: str, logger: str, ttl: float | None, style: Format) -> None:
    """Set a logger's LEVEL: debug, info, warning or error."""
    from kvstow_api.client import calls
    from kvstow_service.cli.tables import LOG_LEVELS

    with connection.client() as client:
        view = client.send(calls.set_log_level(level, logger=logger, ttl_seconds=ttl))
    emit(view, style, lambda view: print_table([view], LOG_LEVELS))


def _parse(setting: str) -> tuple[str, Any]:
    """A value is JSON if it can be, and a text if not."""
    key, equals, text = setting.partition("=")
    if not key or not equals:
        raise click.UsageError(f"{setting!r} is not KEY=VALUE")
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text
