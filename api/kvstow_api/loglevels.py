"""Log levels of KVStow's loggers, set permanently or for a limited time."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from kvstow.errors import ConfigError
from kvstow_api.views.settings import LogLevelView

ROOT = "kvstow"


class _Temporary(NamedTuple):
    """A temporary level: the level to restore, and the timer that does it."""

    before: int
    end: asyncio.TimerHandle


class LogLevels:
    """Sets the level of the logger "kvstow" and of its children, and of no other. Used on the event loop."""

    def __init__(self) -> None:
        self._temporary: dict[str, _Temporary] = {}

    def names(self) -> list[str]:
        """The loggers that exist."""
        below = (name for name in logging.root.manager.loggerDict if name.startswith(f"{ROOT}."))
        return [ROOT, *sorted(below)]

    def view(self, name: str) -> LogLevelView:
        level = logging.getLevelName(logging.getLogger(name).getEffectiveLevel()).lower()
        temporary = self._temporary.get(name)
        left = None if temporary is None else max(0.0, temporary.end.when() - asyncio.get_running_loop().time())
        return LogLevelView(logger=name, level=level, ttl_seconds_left=left)

    def set(self, name: str, level: str, ttl_seconds: float | None) -> LogLevelView:
        """Raises `ConfigError` for a logger that does not exist or is not KVStow's."""
        if name not in self.names():
            raise ConfigError("logger", name, ", ".join(self.names()))
        logger = logging.getLogger(name)
        temporary = self._temporary.pop(name, None)
        before = logger.level if temporary is None else temporary.before
        if temporary is not None:
            temporary.end.cancel()
        if ttl_seconds is not None:
            end = asyncio.get_running_loop().call_later(ttl_seconds, self._restore, name)
            self._temporary[name] = _Temporary(before, end)
        logger.setLevel(level.upper())
        return self.view(name)

    def close(self) -> None:
        """Restore the levels that were set for a limited time."""
        for name in list(self._temporary):
            self._restore(name)

    def _restore(self, name: str) -> None:
        temporary = self._temporary.pop(name)
        temporary.end.cancel()
        logging.getLogger(name).setLevel(temporary.before)
