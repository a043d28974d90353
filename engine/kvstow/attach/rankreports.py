"""What a rank reports, and when: to the node service in one session here, and to an embedded engine in
`kvstow_service.admin.agent`."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from kvstow.attach.calls import Desired, ExtentSlots, RegisteredExtents, ReleasedExtents, Report, listed
from kvstow.attach.connection import Answer, AttachConnection
from kvstow.messages import RankReport

if TYPE_CHECKING:
    from kvstow.dataplane import DataPlane
    from kvstow.memory.mappedpool import MappedPool

REPORT_SECONDS = 1.0
"""The longest pause between two reports of a rank."""
GAP_SECONDS = 0.05
"""The pause between two looks at what has changed. On a busy host, each look costs a handover of the interpreter."""
_NEWS = ("boot_id", "state", "error", "notice", "target_slots", "engine_id", "applied")


def is_news(report: RankReport, reported: RankReport | None) -> bool:
    """Whether the change since the last report is worth a report of its own. More pinned memory, after the first, and
    new counters are not, because they change all the time."""
    if reported is None or any(getattr(report, name) != getattr(reported, name) for name in _NEWS):
        return True
    return report.pinned_slots > 0 and not reported.pinned_slots


class ReportNumbers:
    """Numbers the reports that one process sends. Only the thread that sends them uses it, so a larger number means
    newer state."""

    def __init__(self) -> None:
        self._sender, self._numbers = secrets.token_hex(8), count(1)

    def number(self, report: RankReport) -> RankReport:
        """The report with its number, and with the process that sends it."""
        host, pid = socket.gethostname(), os.getpid()
        return replace(report, sender=self._sender, number=next(self._numbers), host=host, pid=pid)


class RankReports:
    """Reports a rank's state, and the slots that its pool has registered and released. It lives as long as a session.

    One thread uses it, but any thread may set `is_changed`.
    """

    def __init__(
        self, connection: AttachConnection, plane: DataPlane, pool: MappedPool, clock: Callable[[], float]
    ) -> None:
        self.is_changed = False
        """The pool or the rank has changed since the last check."""
        self._connection, self._plane, self._pool, self._clock = connection, plane, pool, clock
        self._numbers = ReportNumbers()
        self._answers: list[Answer[Any]] = []
        """The reports whose answers have not been applied."""
        self._last: RankReport | None = None
        """The last report."""
        self._registered: dict[int, int] = {}
        """How many slots of each extent are registered, as the service knows it."""
        self._next_check = self._next_report = float("-inf")

    def send_due(self) -> float:
        """Report what has changed, and the rank's state if that is due. Returns the seconds until the next report.

        The order of the messages matters: the worker reports that slots are no longer registered, and the desired state
        that it has applied, before it reports their extents as released.
        """
        now = self._clock()
        if now >= (self._next_check if self.is_changed else self._next_report):
            self.is_changed = False  # before the check, so that a change during the check causes another one
            self._check(now)
            # The first slots are urgent, so there is no pause before them.
            self._next_check = now + GAP_SECONDS if any(self._registered.values()) else now
        return max(0.0, (self._next_check if self.is_changed else self._next_report) - now)

    def apply_answers(self) -> None:
        """Apply the desired states in the answers that have arrived. Raises `AttachError`."""
        answers, self._answers = self._answers, []
        for answer in answers:
            if answer.done:
                self._plane.apply(answer.unpack(Desired).desired)
            else:
                self._answers.append(answer)

    def _check(self, now: float) -> None:
        """Send what has changed since the last check."""
        registered, released = dict(self._pool.registered_slots()), self._pool.take_released()
        news = [ExtentSlots(one, slots) for one, slots in registered.items() if self._registered.get(one, 0) != slots]
        self._registered = registered
        for piece in listed(news):
            self._connection.send(RegisteredExtents(piece))
        report = self._plane.report()
        if released or now >= self._next_report or is_news(report, self._last):
            self._next_report, self._last = now + REPORT_SECONDS, report
            self._answers.append(self._connection.call(Report.now(self._numbers.number(report))))
        for extent_ids in listed(released):
            self._connection.send(ReleasedExtents(extent_ids))
