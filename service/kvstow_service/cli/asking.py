"""Flags of the commands that change something, and the question before destructive ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from kvstow_service.cli.exits import CommandError, ExitCode

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
