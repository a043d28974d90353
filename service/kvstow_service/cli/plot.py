"""`kvstow plot`: figures of the last hour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstow.bytesize import format_size
from kvstow_api.numberformat import ABSENT, percent, rate
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.exits import CommandError
from kvstow_service.cli.output import Format, console, emit, format_flag
from kvstow_service.cli.values import TIME

if TYPE_CHECKING:
    from kvstow_api.series import Line, Unit
    from kvstow_api.views.history import NowView

METRICS = ("hit-ratio", "bandwidth", "usage", "blocks", "pinned")
_PIPE_WIDTH = 60
_UNITS: dict[Unit, tuple[float, str]] = {
    "ratio": (0.01, "%"),
    "bytes": (1 << 30, "GiB"),
    "bytes_per_second": (1 << 30, "GiB/s of each rank"),
    "blocks_per_second": (1.0, "blocks/s"),
}
"""What a picture's axis counts in: how much is one of it, and its name."""


@click.command()
@click.argument("metric", type=click.Choice(METRICS))
@click.option("--since", type=TIME, default="10m", show_default=True, help="The last so much time; an hour is kept.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw a picture into this file.")
@format_flag
@remote
def plot(connection: Connection, metric: str, since: float, png: Path | None, style: Format) -> None:
    """Draw figures of the last hour.

    usage is the share of slots in use; blocks are those stored, evicted for room and dropped. "now" is the last 10 s,
    as on the status page. A picture needs matplotlib: pip install 'kvstow[plot]'.
    """
    from kvstow_api.client import calls
    from kvstow_api.series import METRICS, lines_of

    with connection.client() as client:
        history = client.send(calls.history())
    newest = max((sample.time for sample in history.items), default=None)
    if newest is not None:
        begin = newest - timedelta(seconds=since)
        history = replace(history, items=[one for one in history.items if one.time >= begin])
    chosen = METRICS[metric]
    lines = lines_of(chosen, history.items)
    if png is not None:
        _draw(lines, chosen.unit, metric, png)
    else:
        emit(history, style, lambda _: _show(lines, history.now, chosen.unit))


def _show(lines: Sequence[Line], now: NowView, unit: Unit) -> None:
    from kvstow_service.cli.sparkline import sparkline, squeeze

    out = console()
    label = max(len(line.name) for line in lines)
    width = (out.width if out.is_terminal else _PIPE_WIDTH + label) - label - 34
    width = max(width, 10)
    top = 1.0 if unit == "ratio" else None
    for line in lines:
        points = squeeze(line.points, width)
        there = [point for point in line.points if point is not None]
        words = _words(getattr(now, line.figure), there, unit) if there else "nothing yet"
        click.echo(f"{line.name:{label}}  {sparkline(points, width, top):{width}}  {words}")


def _words(now: float | None, points: Sequence[float], unit: Unit) -> str:
    return f"now {_figure(now, unit)}  highest {_figure(max(points), unit)}"


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
        raise CommandError(f"{path} cannot be written: {error}", "name a file ending in .png") from error
    click.echo(str(path))
