"""Levels of the logger "kvstow" and of its children, and of no other."""

from __future__ import annotations

import logging

from kvstow.errors import ConfigError
from kvstow_api.answers import LogLevelView

_ROOT = "kvstow"


def names() -> list[str]:
    """The loggers that exist."""
    below = (name for name in logging.root.manager.loggerDict if name.startswith(f"{_ROOT}."))
    return [_ROOT, *sorted(below)]


def view(name: str) -> LogLevelView:
    level = logging.getLevelName(logging.getLogger(name).getEffectiveLevel()).lower()
    return LogLevelView(logger=name, level=level)


def change(name: str, level: str) -> LogLevelView:
    """Raises `ConfigError` for a logger that does not exist or is not KVStow's."""
    if name not in names():
        raise ConfigError("logger", name, ", ".join(names()))
    logging.getLogger(name).setLevel(level.upper())
    return view(name)
