"""Value types of flags and arguments: times and sizes with units."""

from __future__ import annotations

from collections.abc import Callable

import click

from kvstow.bytesize import parse_size
from kvstow.errors import ConfigError
from kvstow_service.duration import parse_duration


class _Parsed(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """A value that `parse` reads; its `ConfigError` names the allowed ones."""

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return value
        try:
            return self._parse(str(value))
        except ConfigError as error:
            self.fail(f"{error.value!r}; allowed: {error.allowed}", param, ctx)


TIME = _Parsed("time", parse_duration)
"""Seconds, as a float; written as 30s, 500ms, 5m or 0.5."""

SIZE = _Parsed("size", parse_size)
"""Bytes, as an int; written as 8GiB, 500MB or 4096."""
