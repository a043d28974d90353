"""The desired states that reach a rank, in whatever order they come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvstow.messages import DesiredState

_ENGINES_REMEMBERED = 16


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
