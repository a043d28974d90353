"""A thread that does what it is told, in order, and may wait."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("kvstow.tier")


class ActionThread:
    """`do` never waits. An action that raises is logged; those after it are done."""

    def __init__(self, name: str) -> None:
        self._actions: deque[Callable[[], object]] = deque()
        self._state = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, action: Callable[[], object]) -> None:
        with self._state:
            self._actions.append(action)
            self._state.notify_all()

    def close(self) -> None:
        """Do what is left, and end the thread. Idempotent."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._actions or self._closing)
                if not self._actions:
                    return
                action = self._actions.popleft()
            try:
                action()
            except Exception:
                logger.exception("an action on thread %s has failed; the others go on", self._thread.name)
