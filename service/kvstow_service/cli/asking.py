"""Flags of the commands that change something, and the question before destructive ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from kvstow_service.cli.exits import CommandError, ExitCode

if TYPE_CHECKING:
    from kvstow_api.client import Client

_KEYS_PER_LOOKUP = 256  # without an admin's credential a lookup has at most 64 KiB

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

yes_flag: Decorator = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
dry_run_flag: Decorator = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")


def ask(question: str, yes: bool) -> None:
    """Go on only after a yes. Raises `CommandError` for a no, and where nobody is there to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        fix = "say --yes if it shall be done; --dry-run only shows it"
        raise CommandError(f"this would {question}, and there is no terminal to ask on", fix, ExitCode.USAGE)
    if not click.confirm(f"{question[0].upper()}{question[1:]}?", err=True):
        raise CommandError("nothing was changed", "say yes, or --yes")


def keys_of(arguments: Sequence[str]) -> list[str]:
    """Keys given as arguments; - stands for lines of standard input."""
    return [key for argument in arguments for key in (sys.stdin.read().split() if argument == "-" else [argument])]


def presence(client: Client, keys: Sequence[str]) -> list[bool]:
    """Which of the keys are in the pool."""
    from kvstow_api.client import calls

    parts = (keys[start : start + _KEYS_PER_LOOKUP] for start in range(0, len(keys), _KEYS_PER_LOOKUP))
    return [present for part in parts for present in client.send(calls.lookup(part)).present]
