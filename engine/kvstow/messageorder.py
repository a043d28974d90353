"""The order of messages between a rank and the control plane, which may travel by several paths."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from kvstow.messages import DesiredState, RankReport

_ENGINES_REMEMBERED = 16
"""How many replaced engines are remembered, so that their late desired states are recognised."""
_NEWS = ("boot_id", "state", "error", "notice", "target_slots", "engine_id", "applied")
"""The fields of a report whose change is worth a report."""


def is_news(report: RankReport, reported: RankReport | None) -> bool:
    """Whether the change since the last report is worth a report of its own. The first pinned memory is. More pinned
    memory and new counters are not, because a report costs 2 to 4 ms of Python on both sides of the admin API."""
    if reported is None or any(getattr(report, name) != getattr(reported, name) for name in _NEWS):
        return True
    return report.pinned_slots > 0 and not reported.pinned_slots


class ReportSequence:
    """Numbers the reports of one rank in one process, across its boots. Thread-safe."""

    def __init__(self) -> None:
        self._reporting = threading.Lock()
        self._name = secrets.token_hex(8)
        self._last = 0

    def next_report(self, make: Callable[[], RankReport]) -> RankReport:
        """The report that `make` returns, with its number, host and pid. Only one report is made at a time, so a larger
        number means newer state."""
        with self._reporting:
            self._last += 1
            host, pid = socket.gethostname(), os.getpid()
            return replace(make(), sender=self._name, number=self._last, host=host, pid=pid)


class NewestDesiredState:
    """Applies each desired state that is newer than the last one, and counts older ones.

    Desired states reach a rank by two paths (its agent's connection, and the steps of an inference engine), so an older
    one may arrive after a newer one. Applying it would undo a growth while copies use the slots, or restore a pause
    that has ended.

    Thread-safe: desired states are applied one at a time.
    """

    def __init__(self) -> None:
        self._applying = threading.Lock()
        self._left: deque[str] = deque(maxlen=_ENGINES_REMEMBERED)  # engines that have been replaced
        self.applied = DesiredState("", 0, number=0)
        """The desired state that was applied last. A report reads it before it counts slots, so that it never counts
        slots that this state has given up."""
        self.stale = 0
        """How many older desired states were ignored."""

    def apply_if_newer(self, desired: DesiredState, apply: Callable[[DesiredState], None]) -> bool:
        """Apply `desired` if it is newer; True if it was applied. `applied` changes after `apply`, whose errors reach
        the caller."""
        with self._applying:
            before = self.applied
            if desired.engine_id == before.engine_id:
                self.stale += desired.number < before.number
                if desired.number <= before.number:
                    return False
            elif desired.engine_id in self._left:
                self.stale += 1
                return False
            apply(desired)
            if desired.engine_id != before.engine_id:
                self._left.append(before.engine_id)
            self.applied = desired
            return True
