"""The question before destructive commands, and the rule of which commands are destructive."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import click

from kvstow.bytesize import format_size
from kvstow_api.numberformat import counted
from kvstow_service.cli.failures import CommandError, ExitCode

if TYPE_CHECKING:
    from kvstow_api.answers import PlanView, RemovedView
    from kvstow_service.cli.connection import Connection

yes_flag = click.option("--yes", "-y", is_flag=True, help="Proceed without a prompt.")
dry_run_flag = click.option("--dry-run", is_flag=True, help="Show what would happen, and change nothing.")


class Effect(NamedTuple):
    """What a command is about to do to a server: `words` follow "would". None: not counted beforehand."""

    words: str
    lost_blocks: int | None = 0
    lost_protections: int | None = 0
    fails_readyz: bool = False
    ends_engine: bool = False

    @property
    def is_destructive(self) -> bool:
        """The rule: a command is destructive if it loses what no other command brings back (blocks, or the record of
        which blocks are protected), if it makes /readyz fail, or if it takes the cache from an engine."""
        return self.lost_blocks != 0 or self.lost_protections != 0 or self.fails_readyz or self.ends_engine


def evicted(plan: PlanView | RemovedView) -> str:
    """What the server evicts, or has evicted, in words."""
    return f"{counted(plan.evicted_slots, 'block')}, {format_size(plan.evicted_bytes)} of each rank"


def confirm(effect: Effect, connection: Connection, yes: bool) -> None:
    """Return if the command may go on. A destructive one names its server first: in a question, or with `yes` in a line
    on standard error. Raises `CommandError` for a no, and where there is no terminal to ask on."""
    if not effect.is_destructive:
        return
    if yes:
        click.echo(f"server: {connection.server}", err=True)
        return
    if not sys.stdin.isatty():
        raise CommandError(
            f"this would {effect.words} on {connection.server}, and there is no terminal to confirm it on",
            "--yes proceeds without a prompt; --dry-run only shows what would happen",
            ExitCode.USAGE,
        )
    if not click.confirm(f"{effect.words[0].upper()}{effect.words[1:]} on {connection.server}?", err=True):
        raise CommandError("nothing was changed", "--yes proceeds without a prompt")
