"""Exit codes of the commands that ask a server, and how they say what went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING

import click

from kvstow.errors import ConfigError, KvstowError

if TYPE_CHECKING:
    from kvstow_api.client import ApiError


class ExitCode(IntEnum):
    """One for each thing that a script may want to tell apart."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_READY = 3
    NOT_FOUND = 4
    CONFLICT = 5


class CommandError(KvstowError):
    """A command cannot do what it was asked to. `fix`: what its user can do about it."""

    code = "command_failed"

    def __init__(self, message: str, fix: str, exit_code: ExitCode = ExitCode.ERROR) -> None:
        super().__init__(message)
        self.fix, self.exit_code = fix, exit_code

    def __reduce__(self) -> tuple[type[CommandError], tuple[str, str, ExitCode]]:
        return type(self), (str(self), self.fix, self.exit_code)


_CODES = {
    400: ExitCode.USAGE,
    404: ExitCode.NOT_FOUND,
    409: ExitCode.CONFLICT,
    412: ExitCode.CONFLICT,
    422: ExitCode.USAGE,
    503: ExitCode.NOT_READY,
}
_FIXES = {
    401: "give a file with a token that is valid there: --token-file, KVSTOW_TOKEN_FILE, or `kvstow context set`",
    403: "use an admin's token: --token-file, KVSTOW_TOKEN_FILE, or `kvstow context set`",
    409: "`kvstow describe server` shows what the server is doing; try again when it has ended",
    412: "somebody else has changed the settings meanwhile: look again, then repeat",
}
_UNREACHABLE = (
    "see that KVStow's admin server runs there, or name another: --server, KVSTOW_SERVER, or `kvstow context use`"
)
_LISTED_BY = {"cancel": "operations"}
"""Commands whose name is not that of what they look for, and the noun of `kvstow get` that lists it."""


def exit_code_of(error: KvstowError) -> ExitCode:
    from kvstow_api.client import ApiError

    match error:
        case CommandError():
            return error.exit_code
        case ApiError():
            # Without a problem it may be anybody's answer: a 404 of another server names nothing that is missing.
            return _CODES.get(error.problem.status, ExitCode.ERROR) if error.problem else ExitCode.ERROR
        case ConfigError():
            return ExitCode.USAGE
    return ExitCode.ERROR


def fix_of(error: KvstowError, command: str = "") -> str | None:
    """What the user can do about it, as far as can be told from here. `command`: the name of the one that failed."""
    from kvstow_api.client import ApiError

    match error:
        case CommandError():
            return error.fix
        case ApiError():
            return _fix_of_problem(error, command)
    return None


def _fix_of_problem(error: ApiError, command: str) -> str | None:
    problem = error.problem
    if problem is None:
        return _UNREACHABLE
    if problem.errors:
        return "; ".join(f"{one.field}: {one.allowed}" for one in problem.errors)
    if problem.retry_after is not None:
        return f"try again in {problem.retry_after} s"
    if problem.status == 404:
        return f"`kvstow get {_LISTED_BY.get(command, command)}` lists what there is"
    return _FIXES.get(problem.status)


@contextmanager
def complaining() -> Iterator[None]:
    """KVStow's errors become words on standard error, what to do about them included, and the exit code."""
    try:
        yield
    except KvstowError as error:
        context = click.get_current_context()
        click.echo(f"{context.command_path}: {error}", err=True)
        if fix := fix_of(error, context.info_name or ""):
            click.echo(f"fix: {fix}", err=True)
        context.exit(exit_code_of(error))
