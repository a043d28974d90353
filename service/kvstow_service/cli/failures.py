"""How commands fail: they print an error with a hint on standard error, and return an exit code."""

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
    """The outcomes that a script may want to distinguish."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_READY = 3
    NOT_FOUND = 4
    CONFLICT = 5


class CommandError(KvstowError):
    """A command cannot do what its user wants. `hint` says what the user can do."""

    code = "command_failed"

    def __init__(self, message: str, hint: str, exit_code: ExitCode = ExitCode.ERROR) -> None:
        super().__init__(message)
        self.hint, self.exit_code = hint, exit_code

    def __reduce__(self) -> tuple[type[CommandError], tuple[str, str, ExitCode]]:
        return type(self), (str(self), self.hint, self.exit_code)


_CODES = {
    400: ExitCode.USAGE,
    404: ExitCode.NOT_FOUND,
    409: ExitCode.CONFLICT,
    412: ExitCode.CONFLICT,
    422: ExitCode.USAGE,
    503: ExitCode.NOT_READY,
}
_HINTS = {
    401: "give a valid token, --token-file or KVSTOW_TOKEN_FILE, or use the server's socket: --server unix:/PATH",
    403: "use an admin's token, --token-file or KVSTOW_TOKEN_FILE, or the server's socket: --server unix:/PATH",
    409: "if something is under way, which `kvstow describe server` shows, try again when it has ended",
    412: "the settings changed in the meantime; check them and try again",
}
_UNREACHABLE = (
    "check that KVStow's admin server runs there and is not stopped (state T in `ps`), or choose another: --server or "
    "KVSTOW_SERVER"
)
_TLS_HINTS = {
    "CERTIFICATE_VERIFY_FAILED": "give the certificate of the authority that has signed the server's: --ca-file or "
    "KVSTOW_CA_FILE",
    "disconnected without sending a response": "if the server uses TLS, its address begins with https://",
}
"""What helps against errors of TLS, by words in the error."""
_LISTED_BY = {
    "block": "blocks",
    "pool": "pools",
    "detach": "sessions",
    "rank": "ranks",
    "transfer": "transfers",
    "operation": "operations",
    "cancel": "operations",
}
"""The lists of `kvstow get` whose items a command takes, by the name of the command."""


def exit_code_of(error: KvstowError) -> ExitCode:
    from kvstow_api.client import ApiError

    match error:
        case CommandError():
            return error.exit_code
        case ApiError():
            # Without a problem document, another server may have answered. Its 404 says nothing about ours.
            return _CODES.get(error.problem.status, ExitCode.ERROR) if error.problem else ExitCode.ERROR
        case ConfigError():
            return ExitCode.USAGE
    return ExitCode.ERROR


def hint_for(error: KvstowError, command: str = "") -> str | None:
    """Return what the user can do, if that is known. `command` is the name of the command that failed."""
    from kvstow_api.client import ApiError

    match error:
        case CommandError():
            return error.hint
        case ApiError():
            return _hint_for_problem(error, command)
    return None


def _hint_for_problem(error: ApiError, command: str) -> str | None:
    problem = error.problem
    if problem is None:
        return next((hint for words, hint in _TLS_HINTS.items() if words in str(error)), _UNREACHABLE)
    if problem.errors:
        unsaid = [one for one in problem.errors if one.allowed not in one.message]
        return "; ".join(f"{one.field}: {one.allowed}" for one in unsaid) or None
    if problem.retry_after is not None:
        return f"try again in {problem.retry_after} s"
    if problem.status == 404 and command in _LISTED_BY:
        return f"`kvstow get {_LISTED_BY[command]}` lists what there is"
    return _HINTS.get(problem.status)


@contextmanager
def reporting_failures() -> Iterator[None]:
    """Print KVStow's errors with their hints to standard error, and exit with their codes."""
    try:
        yield
    except KvstowError as error:
        context = click.get_current_context()
        click.echo(f"{context.command_path}: {error}", err=True)
        if hint := hint_for(error, context.info_name or ""):
            click.echo(f"hint: {hint}", err=True)
        context.exit(exit_code_of(error))
