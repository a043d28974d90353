"""Functions to call when something has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("kvstow.callbacks")


class Callbacks:
    """Functions that one object calls for others. Thread-safe. If a callback raises, the error is logged, and the
    others are still called."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def register(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def call(self) -> None:
        """Call all of them on this thread."""
        for callback in tuple(self._callbacks):
            try:
                callback()
            except Exception:
                logger.exception("a callback has failed")
