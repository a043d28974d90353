"""Callbacks that want to hear of a change."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("kvstow.listeners")


class Listeners:
    """Thread-safe. A callback that raises is logged: it harms neither the others nor the thread that tells them."""

    def __init__(self) -> None:
        self._callbacks: tuple[Callable[[], None], ...] = ()

    def add(self, callback: Callable[[], None]) -> None:
        self._callbacks = (*self._callbacks, callback)

    def tell(self) -> None:
        """Call them all, on this thread."""
        for callback in self._callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a listener has failed")
