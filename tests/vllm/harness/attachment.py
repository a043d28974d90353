"""What attaches a rank of the harness to a service, in lock step with the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.service.connectors.vllm.slowservice import SlowService

from kvstow.attach.hello import SessionTicket
from kvstow.attach.worker import OpGate
from kvstow.control.attachedsession import AttachedSession
from kvstow.devices.base import Fence
from kvstow.messages import Completion, StepPlan


class SteppedAttachment:
    """An `AttachedWorker` without connection and thread: its gate is real, and `turn` does what the thread does. The
    rank's memory outlives all sessions."""

    problem = None

    def __init__(self, plane: Any, service: SlowService) -> None:
        self.plane, self._service = plane, service
        self._gate = OpGate(plane, stores=True)
        self._newest = self._joined = 0
        self._session: AttachedSession | None = None

    def start(self, *, at_ease: bool = False) -> None:
        self.plane.start(at_ease=at_ease)

    def join(self, ticket: SessionTicket) -> None:
        self._newest = max(self._newest, ticket.number)

    def begin_step(self) -> None:
        """There is no thread that could shut the gate within a step."""

    end_step = begin_step

    def submit(self, plan: StepPlan, after: Fence | None = None) -> None:
        self._gate.submit(plan, after)

    def take_completions(self) -> list[Completion]:
        return self._gate.take_completions()

    @property
    def is_attached(self) -> bool:
        return self._session is not None and not self._session.is_lost

    def close(self, timeout: float = 0.0) -> bool:
        self._gate.shut()
        return bool(self.plane.close(timeout))

    def turn(self) -> None:
        """Leave a session for a newer one when nothing is under way in it, and report."""
        rank, service = self.plane.rank, self._service
        if self._newest > self._joined:
            self._gate.shut()
            if not self._gate.is_quiet():
                return
            if self._session is not None:
                service.let_go(self._session, rank)
            self._joined, self._session = self._newest, service.session
            self._gate.open(self._joined)
        if self._session is not None and self.is_attached:
            desired = service.pool.desired
            report = replace(self.plane.report(), engine_id=desired.engine_id, applied=desired.number)
            self._session.report(report)
