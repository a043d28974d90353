"""`kvstow plot`: metrics of the last hour, as sparklines or as a picture."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

import click

from kvstow.bytesize import format_size
from kvstow_api.numberformat import ABSENT, percent, rate
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.failures import CommandError
from kvstow_service.cli.output import Format, emit, format_flag
from kvstow_service.cli.poolflag import pool_flag
from kvstow_service.cli.valuetypes import TIME

if TYPE_CHECKING:
    from kvstow_api.history import Line, NowView, Unit

METRICS = ("hit-ratio", "bandwidth", "usage", "blocks", "pinned")
_WORDS = 34  # columns for the numbers after a sparkline
_PIPE_WIDTH = 26
_UNITS: dict[Unit, tuple[float, str]] = {
    "ratio": (0.01, "%"),
    "bytes": (1 << 30, "GiB"),
    "bytes_per_second": (1 << 30, "GiB/s of each rank"),
    "blocks_per_second": (1.0, "blocks/s"),
}
"""Units of a picture's axis: the value of one, and its name."""


@click.command()
@click.argument("metric", type=click.Choice(METRICS), metavar="METRIC")
@click.option("--since", type=TIME, default="10m", show_default=True, help="How far back, at most an hour.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw a picture into this file instead.")
@format_flag
@pool_flag
@remote
def plot(connection: Connection, metric: str, since: float, png: Path | None, style: Format, pool: str | None) -> None:
    """Plot metrics of the last hour.

    METRIC is hit-ratio, bandwidth, usage (share of slots in use), blocks (stored, evicted for capacity, dropped) or
    pinned. "now" is the last 10 s, as on the status page. A picture needs matplotlib: pip install 'kvstow[plot]'.
    """
    from kvstow_api.client import calls
    from kvstow_api.history import METRICS, lines_of

    with connection.client() as client:
        history = client.send(calls.history(pool=pool))
    newest = max((sample.time for sample in history.items), default=None)
    if newest is not None:
        begin = newest - timedelta(seconds=since)
        history = replace(history, items=[one for one in history.items if one.time >= begin])
    chosen = METRICS[metric]
    lines = lines_of(chosen, history.items)
    if png is not None:
        _draw(lines, chosen.unit, metric, png)
    else:
        emit(history, style, lambda _: "\n".join(_lines(lines, history.now, chosen.unit)))


def _lines(lines: Sequence[Line], now: NowView, unit: Unit) -> Iterator[str]:
    from kvstow_service.cli.sparkline import sparkline, squeeze

    label = max(len(line.name) for line in lines)
    width = max(10, get_terminal_size().columns - label - _WORDS) if sys.stdout.isatty() else _PIPE_WIDTH
    top = 1.0 if unit == "ratio" else None
    for line in lines:
        points = squeeze(line.points, width)
        there = [point for point in line.points if point is not None]
        words = _words(getattr(now, line.figure), there, unit) if there else "nothing yet"
        yield f"{line.name:{label}}  {sparkline(points, width, top):{width}}  {words}"


def _words(now: float | None, points: Sequence[float], unit: Unit) -> str:
    highest = max(points) if now is None else max(now, *points)
    return f"now {_figure(now, unit)}  highest {_figure(highest, unit)}"


def _figure(value: float | None, unit: Unit) -> str:
    if value is None:
        return ABSENT
    if unit == "ratio":
        return percent(value)
    if unit == "bytes":
        return format_size(value)
    return rate(value) if unit == "bytes_per_second" else f"{value:.1f}/s"


def _draw(lines: Sequence[Line], unit: Unit, title: str, path: Path) -> None:
    try:
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise CommandError("a picture needs matplotlib", "pip install 'kvstow[plot]'") from error
    one, name = _UNITS[unit]
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for line in lines:
        points = [float("nan") if point is None else point / one for point in line.points]
        axes.plot(line.times, points, label=line.name, linewidth=1.5)  # type: ignore[arg-type]
    locator = AutoDateLocator()  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    axes.set_ylim(0, 100 if unit == "ratio" else None)
    axes.set_ylabel(name)
    axes.set_xlabel("UTC")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(loc="upper left", frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be written: {error}", "choose a writable file ending in .png") from error
    click.echo(str(path))
