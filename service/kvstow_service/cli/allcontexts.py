"""`--all-contexts`: one command to the servers of all contexts at once."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

import click

from kvstow.errors import ConfigError, KvstowError
from kvstow_service.cli.connection import Connection, Given, connection_flags
from kvstow_service.cli.contexts import Context, ContextFile
from kvstow_service.cli.failures import CommandError, ExitCode, hint_for, reporting_failures

if TYPE_CHECKING:
    from kvstow_api.client import Client

T = TypeVar("T")

_WANTED = "kvstow.all_contexts"


def _note(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted:
        context.meta[_WANTED] = True


all_contexts_flag = click.option(
    "--all-contexts",
    is_flag=True,
    expose_value=False,
    callback=_note,
    help="For get and doctor: ask the servers of all contexts (`kvstow context list`) at once.",
)
"""Before the command or after it."""


def is_wanted(context: click.Context) -> bool:
    return bool(context.meta.get(_WANTED))


def remote_or_all(command: Callable[..., None]) -> Callable[..., None]:
    """As `remote`, for a command that can ask several servers: its first argument is a `Connection`, or with
    `--all-contexts` an `AllContexts`."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        with reporting_failures():
            given = Given.take(options)
            if is_wanted(click.get_current_context()):
                command(AllContexts.choose(given, os.environ), **options)
            else:
                command(Connection.choose(given.context, given.name, os.environ, timeout=given.timeout), **options)

    return all_contexts_flag(connection_flags(run))


class Failure(NamedTuple):
    """A server that gave no answer to use, and why."""

    context: str
    server: str
    error: KvstowError


class Answers(NamedTuple, Generic[T]):
    """By context, in the order of their names."""

    views: Mapping[str, T]
    failures: Sequence[Failure]

    def failed(self) -> list[dict[str, str]]:
        """The failures as JSON and YAML have them."""
        return [
            {"context": one.context, "server": one.server, "error": str(one.error), "hint": hint_for(one.error) or ""}
            for one in self.failures
        ]

    def lines(self) -> list[str]:
        """The failures in words."""
        return [f"context {one.context} ({one.server}): {one.error}" for one in self.failures]

    def report(self) -> ExitCode:
        """Name the failures on standard error. Returns the command's exit code."""
        command = click.get_current_context().command_path
        for one, line in zip(self.failures, self.lines(), strict=True):
            click.echo(f"{command}: {line}", err=True)
            if hint := hint_for(one.error, click.get_current_context().info_name or ""):
                click.echo(f"hint: {hint}", err=True)
        return ExitCode.NOT_ANSWERED if self.failures else ExitCode.OK


class AllContexts:
    """The servers of all contexts, each asked on a thread of its own.

    A thread may outlive the deadline, as a server can send its answer byte by byte. It is a daemon, so it does not keep
    the process alive, and its server is not asked again before it has ended.
    """

    def __init__(self, contexts: Mapping[str, Context], timeout: float) -> None:
        """`timeout`: seconds until a server must have answered."""
        self._connections = {name: Connection(contexts[name], timeout, name) for name in sorted(contexts)}
        self._timeout = timeout
        self._busy: dict[str, Thread] = {}

    @classmethod
    def choose(cls, given: Given, environ: Mapping[str, str]) -> Self:
        """The contexts of the user's file. Raises `click.UsageError` if there are none, `ConfigError` for flags that
        are about one server: each context has its own."""
        for name, value in {"context": given.name, **asdict(given.context)}.items():
            if value:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(flag, value, "nothing with --all-contexts: each context has its own")
        file = ContextFile.read(environ)
        if not file.contexts:
            raise click.UsageError(f"--all-contexts: {file.path} has no contexts; `kvstow context set` adds one")
        return cls(file.contexts, given.timeout)

    def ask(self, question: Callable[[Client], T]) -> Answers[T]:
        """Ask all servers at once. One that has not answered after its connection's timeout has failed.

        Raises what `question` raises, other than `KvstowError`.
        """
        answers: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        deadline = time.monotonic() + self._timeout
        outcomes: dict[str, Any] = {}
        waiting = set()
        for name, connection in self._connections.items():
            busy = self._busy.get(name)
            if busy is not None and busy.is_alive():
                outcomes[name] = self._silence()
                continue
            given = (name, connection, question, answers)
            thread = self._busy[name] = Thread(target=_ask, args=given, name=f"context {name}", daemon=True)
            thread.start()
            waiting.add(name)
        while waiting:
            try:
                name, outcome = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                break
            outcomes[name] = outcome
            waiting.remove(name)
        return self._sorted({**dict.fromkeys(waiting, self._silence()), **outcomes})

    def _silence(self) -> CommandError:
        return CommandError(f"it did not answer within {self._timeout:g} s", "--request-timeout waits longer")

    def _sorted(self, outcomes: Mapping[str, Any]) -> Answers[Any]:
        views, failures = {}, []
        for name, connection in self._connections.items():
            match outcomes[name]:
                case KvstowError() as error:
                    failures.append(Failure(name, connection.context.server, error))
                case BaseException() as error:
                    raise error
                case view:
                    views[name] = view
        return Answers(views, failures)


def _ask(
    name: str, connection: Connection, question: Callable[[Client], Any], answers: SimpleQueue[tuple[str, Any]]
) -> None:
    try:
        with connection.client() as client:
            answers.put((name, question(client)))
    except BaseException as error:  # noqa: BLE001 - raised where the answers are read
        answers.put((name, error))
