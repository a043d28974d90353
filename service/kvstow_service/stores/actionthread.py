"""A thread that makes calls for which others must not wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger("kvstow.tier")


class ActionThread:
    """Makes calls in their order. `do` never waits. A call that raises is logged, and the next one is made."""

    def __init__(self, name: str) -> None:
        self._actions = SimpleQueue[Callable[[], object] | None]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, action: Callable[[], object]) -> None:
        self._actions.put(action)

    def close(self, seconds: float | None = None) -> None:
        """Make the remaining calls, and end the thread. Waits at most `seconds` for that; None waits without a limit.
        Idempotent."""
        self._actions.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (action := self._actions.get()) is not None:
            try:
                action()
            except Exception:
                logger.exception("an action on thread %s has failed; the others go on", self._thread.name)
