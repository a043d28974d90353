"""The progress of long commands: bars on a terminal, and lines from time to time elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_SECONDS = 10.0


class Bar:
    """The progress of one kind of work. Call it with how much is done, and a text for that."""

    def __init__(self, words: str, total: float, bars: Progress | None, clock: Callable[[], float]) -> None:
        self._words, self._total, self._bars, self._clock = words, total, bars, clock
        self._task = None if bars is None else bars.add_task(words, total=total, count="")
        self._next_line = clock() + LINE_SECONDS

    def __call__(self, done: float, count: str | None = None) -> None:
        """Show that `done` is done. `count` is the text for it; the default says how much of the total."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=done, count=self._counted(done, count))
        elif self._clock() >= self._next_line:
            self._next_line = self._clock() + LINE_SECONDS
            click.echo(f"{self._words}: {self._counted(done, count)}", err=True)

    def _counted(self, done: float, count: str | None) -> str:
        return f"{done:,}/{self._total:,}" if count is None else count


class ProgressBars:
    """A context in which bars are shown on standard error. If that is no terminal, each bar writes a line every
    `LINE_SECONDS` instead, so that a log shows how far a long command is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bars: Progress | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
            self._bars = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._bars.start()
        return self

    def __exit__(self, *args: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def bar(self, words: str, total: float) -> Bar:
        return Bar(words, total, self._bars, self._clock)

    def say(self, line: str) -> None:
        """Write a line above the bars."""
        if self._bars is None:
            click.echo(line, err=True)
        else:
            self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)
