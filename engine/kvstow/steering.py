"""What a rank and the control plane tell each other over several ways: in which order it was said."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from kvstow.messages import DesiredState, RankReport

_ENGINES_REMEMBERED = 16


class Sender:
    """Numbers the reports of one rank in one process, over all boots that it has there. Thread-safe."""

    def __init__(self) -> None:
        self._reporting = threading.Lock()
        self._name = secrets.token_hex(8)
        self._last = 0

    def send(self, look: Callable[[], RankReport]) -> RankReport:
        """What `look` finds, numbered: reports are taken one at a time, so the larger number has the newer state."""
        with self._reporting:
            self._last += 1
            return replace(look(), sender=self._name, number=self._last)


class Steering:
    """Follows each desired state that is newer than the last one, and counts those that are older.

    Answers take two ways to a rank (its agent's connection, and the steps of an inference engine), so a late one may
    arrive after a newer one. Obeyed, it would take back a growth while copies use the slots, or a pause that has ended.

    Thread-safe: desired states are put into effect one at a time.
    """

    def __init__(self) -> None:
        self._following = threading.Lock()
        self._left: deque[str] = deque(maxlen=_ENGINES_REMEMBERED)  # engines that are over
        self.followed = DesiredState("", 0, number=0)
        """The last one that is in effect. A report that reads it before it counts slots counts none that it takes."""
        self.stale = 0

    def follow(self, desired: DesiredState, put_into_effect: Callable[[DesiredState], None]) -> bool:
        """True if `desired` is new, and in effect now; `followed` changes after `put_into_effect`, whose errors are
        the caller's."""
        with self._following:
            before = self.followed
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
            self.followed = desired
            return True
