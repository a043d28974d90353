"""The admin server of a replay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory

from kvstow_service.admin.adminhost import AdminOptions
from kvstow_service.admin.agent import RankAgent, Rendezvous
from kvstow_service.admin.embedded import EmbeddedAdmin
from kvstow_service.replay.session import Session


@contextmanager
def replay_admin(session: Session, port: int) -> Iterator[EmbeddedAdmin]:
    """Serve the admin API of the session on a port of 127.0.0.1, whose ranks report to it from now on."""
    identity = f"replay-{os.getpid()}"
    with ExitStack() as stack:
        environ = {"XDG_RUNTIME_DIR": stack.enter_context(TemporaryDirectory(prefix="kvstow-"))}
        admin = EmbeddedAdmin(
            session.engine,
            AdminOptions(port=port),
            identity=identity,
            mode="replay",
            max_capacity_slots=session.engine.config.capacity_slots,
            head_start=0.0,
            environ=environ,
        )
        admin.start()
        stack.callback(admin.stop)
        for number, rank in enumerate(session.ranks):
            agent = RankAgent(number, rank.worker, Rendezvous(identity, environ))
            agent.start()
            stack.callback(agent.stop)
        yield admin
