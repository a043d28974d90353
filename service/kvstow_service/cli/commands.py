"""The subcommands by name: help lists them, and the module of the one that runs is all that is imported."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

COMMANDS = {
    "serve": "Run the service: engine, data plane, admin server.",
    "replay": "Replay a request trace and verify every loaded byte.",
    "trace": "Make request traces.",
    "get": "Show what there is: pools, ranks, blocks, transfers, ...",
    "describe": "Show one thing at full length.",
    "top": "Watch the server live.",
    "plot": "Draw figures of the last hour.",
    "events": "Print what happens, as it happens, until Ctrl-C.",
    "doctor": "Say what is not as it should be, and what mends it.",
    "wait": "Wait until the server is ready, pinned or drained.",
    "evict": "Remove the coldest blocks.",
    "purge": "Remove blocks by key, age or number, protected ones included.",
    "protect": "Protect blocks from eviction.",
    "unprotect": "Let blocks be evicted again.",
    "resize": "Give the pool of every rank SIZE bytes, such as 16GiB.",
    "pinning": "Pause, resume or retry the pinning of memory.",
    "drain": "Let what is in flight end, and take nothing new.",
    "undrain": "Take traffic again.",
    "bypass": "Switch loads or stores off, and leave the pool as it is.",
    "cancel": "End a long-running operation; what it has done stays done.",
    "config": "Show and change the server's settings.",
    "context": "Give servers names, and choose the one that commands ask.",
    "completion": "Print a script that makes the shell complete commands.",
}
"""Module of this package, which has a command of its name, and the first line of that command's help."""


class LazyGroup(click.Group):
    """Knows the subcommands by name and by a line of help, until one is called."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.commands = {name: click.Command(name, help=line) for name, line in COMMANDS.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else load(name or ""), rest


def load(name: str) -> click.Command:
    """The subcommand `name`, with all its flags."""
    try:
        command: click.Command = getattr(import_module(f"kvstow_service.cli.{name}"), name)
    except ModuleNotFoundError as error:
        needs = f"`kvstow {name}` needs the package {error.name}; this comes with it: pip install 'kvstow[service,cli]'"
        raise click.ClickException(needs) from error
    return command
