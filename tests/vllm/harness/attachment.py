"""What attaches a rank of the harness to a service, in lock step with the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.service.connectors.vllm.slowservice import SlowService

from kvstow.attach.worker import AttachedWorker, _JoinedSession
from kvstow.control.attachedsession import AttachedSession


class SteppedAttachment(AttachedWorker):
    """It has no connection and no thread: its gate is real, and `turn` does what the thread does. The rank's memory
    outlives all sessions."""

    def __init__(self, plane: Any, service: SlowService, is_impatient: Callable[[], bool]) -> None:
        """`is_impatient`: whether it waits no longer for a host that may have ops of a session that has ended."""
        super().__init__(Path("/none"), plane, plane.pool, engine="harness")
        self.plane, self._service, self._is_impatient = plane, service, is_impatient
        self._session: AttachedSession | None = None

    def start(self, *, at_ease: bool = False) -> None:
        self.plane.start(at_ease=at_ease)

    @property
    def is_attached(self) -> bool:
        return self._session is not None and not self._session.is_lost

    def turn(self) -> None:
        """Leave a session for a newer one when nothing is under way in it, and report."""
        rank, service = self.plane.rank, self._service
        if self._newest.number > self._joined.ticket.number:
            self._gate.shut()
            if not self._gate.is_quiet():
                return
            if self._session is not None:
                service.let_go(self._session, rank)
            self._joined, self._session = _JoinedSession(self._newest), service.session
            self._gate.open(self._newest.number)
        if self._session is not None and not self.is_attached:
            if self._is_impatient():
                self._gate.shut()
            if self._gate.shut_unless_held() and self._gate.is_quiet():
                service.let_go(self._session, rank)
                self._session = None
        if self._session is not None and self.is_attached:
            desired = service.pool.target.desired
            report = replace(self.plane.report(), engine_id=desired.engine_id, applied=desired.number)
            self._session.report(report)
