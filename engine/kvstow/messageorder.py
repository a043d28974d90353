"""The order of messages between a rank and the control plane, which may take several paths."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from kvstow.messages import DesiredState, RankReport

_ENGINES_REMEMBERED = 16


class ReportSequence:
    """Numbers the reports of one rank in one process, across its boots. Thread-safe."""

    def __init__(self) -> None:
        self._reporting = threading.Lock()
        self._name = secrets.token_hex(8)
        self._last = 0

    def next_report(self, look: Callable[[], RankReport]) -> RankReport:
        """The report that `look` makes, numbered. Reports are made one at a time: a larger number means newer state."""
        with self._reporting:
            self._last += 1
            return replace(look(), sender=self._name, number=self._last)


class NewestDesiredState:
    """Follows each desired state that is newer than the last one, and counts those that are older.

    Answers reach a rank by two paths (its agent's connection, and the steps of an inference engine), so an older one
    may arrive after a newer one. Following it would undo a growth while copies use the slots, or restore a pause that
    has ended.

    Thread-safe: desired states are put into effect one at a time.
    """

    def __init__(self) -> None:
        self._following = threading.Lock()
        self._left: deque[str] = deque(maxlen=_ENGINES_REMEMBERED)  # engines that are over
        self.applied = DesiredState("", 0, number=0)
        """The last one put into effect. A report reads it before it counts slots, so it never
        counts slots that this state has given up."""
        self.stale = 0

    def apply_if_newer(self, desired: DesiredState, put_into_effect: Callable[[DesiredState], None]) -> bool:
        """True if `desired` is new and now in effect. `followed` changes after `put_into_effect`, whose errors reach
        the caller."""
        with self._following:
            before = self.applied
            if desired.engine_id == before.engine_id:
                self.stale += desired.number < before.number
                if desired.number <= before.number:
                    return False
            elif desired.engine_id in self._left:
                self.stale += 1
                return False
            put_into_effect(desired)
            if desired.engine_id != before.engine_id:
                self._left.append(before.engine_id)
            self.applied = desired
            return True
