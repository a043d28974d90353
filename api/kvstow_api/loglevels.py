"""Levels of KVStow's loggers, for a time or until they are set again."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from kvstow.errors import ConfigError
from kvstow_api.views.config import LogLevelView

ROOT = "kvstow"


class _Loan(NamedTuple):
    """A level for a time, and the level that comes back then."""

    before: int
    end: asyncio.TimerHandle


class LogLevels:
    """Sets levels of the logger "kvstow" and those below it, never of another. On the event loop."""

    def __init__(self) -> None:
        self._loans: dict[str, _Loan] = {}

    def names(self) -> list[str]:
        """Of the loggers there are."""
        below = (name for name in logging.root.manager.loggerDict if name.startswith(f"{ROOT}."))
        return [ROOT, *sorted(below)]

    def view(self, name: str) -> LogLevelView:
        level = logging.getLevelName(logging.getLogger(name).getEffectiveLevel()).lower()
        loan = self._loans.get(name)
        left = None if loan is None else max(0.0, loan.end.when() - asyncio.get_running_loop().time())
        return LogLevelView(logger=name, level=level, ttl_seconds_left=left)

    def set(self, name: str, level: str, ttl_seconds: float | None) -> LogLevelView:
        """Raises `ConfigError` for a logger that is not there or not ours."""
        if name not in self.names():
            raise ConfigError("logger", name, ", ".join(self.names()))
        logger = logging.getLogger(name)
        loan = self._loans.pop(name, None)
        before = logger.level if loan is None else loan.before
        if loan is not None:
            loan.end.cancel()
        if ttl_seconds is not None:
            end = asyncio.get_running_loop().call_later(ttl_seconds, self._restore, name)
            self._loans[name] = _Loan(before, end)
        logger.setLevel(level.upper())
        return self.view(name)

    def close(self) -> None:
        """Put back what was set for a time."""
        for name in list(self._loans):
            self._restore(name)

    def _restore(self, name: str) -> None:
        loan = self._loans.pop(name)
        loan.end.cancel()
        logging.getLogger(name).setLevel(loan.before)
