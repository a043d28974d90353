"""Which pool, or which session, of a server a command means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvstow_service.cli.failures import CommandError, ExitCode

if TYPE_CHECKING:
    from kvstow.status import SessionStatus
    from kvstow_api.client import Client

pool_flag = click.option("--pool", metavar="NAME", help="The pool; needed only where the server has several.")


def chosen_pool(client: Client, name: str | None) -> str:
    """`name`, or that of the only pool. Raises `CommandError` if there is none, or if there are several."""
    from kvstow_api.client import calls

    if name is not None:
        return name
    names = [pool.name for pool in client.send(calls.pools()).items]
    if not names:
        raise CommandError(
            "no engine has attached yet, so there is no pool",
            "`kvstow get sessions` lists the engines that are attached",
            ExitCode.CONFLICT,
        )
    if len(names) > 1:
        raise CommandError(f"the server has {len(names)} pools", f"give --pool: {', '.join(names)}", ExitCode.USAGE)
    return names[0]


def find_session(client: Client, session_id: str) -> SessionStatus:
    """Raises `CommandError` if there is none with this id."""
    from kvstow_api.client import calls

    for session in client.send(calls.sessions()).items:
        if session.id == session_id:
            return session
    raise CommandError(f"there is no session {session_id!r}", "`kvstow get sessions` lists them", ExitCode.NOT_FOUND)
