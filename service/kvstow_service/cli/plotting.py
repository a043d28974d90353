"""`kvstow plot`: draws the shares of blocks that hit, by the size of the pool, with characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from shutil import get_terminal_size
from typing import TYPE_CHECKING, NamedTuple

import click

from kvstow.bytesize import format_size
from kvstow_service.cli.connection import Invocation, chosen_pool, pool_flag, remote
from kvstow_service.cli.failures import CommandError, ExitCode
from kvstow_service.cli.output import styled

if TYPE_CHECKING:
    from kvstow_api.answers import PoolCurveView

_COLOURS = ("green", "blue", "yellow", "magenta", "cyan", "red")
_MARKS = "●○◆◇▲△"
"""Marks that tell the lines apart on terminals without colours."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a braille character, by row and column. It has four rows of two dots."""
_BLANK = 0x2800
"""The braille character without dots."""
_Cell = tuple[str, str | None]
_WIDTH, _HEIGHT = 72, 15
_AXIS = 8  # the columns of the axis on the left


class Line(NamedTuple):
    """The share of hits for each size, or None where it is unknown."""

    name: str
    ratios: Sequence[float | None]


class Plot(NamedTuple):
    """Lines over sizes in slots, the smallest first, with a label for each size. `now` is the number of the pool's
    present size among them. `limit` is a share that no size exceeds."""

    title: str
    sizes: Sequence[int]
    labels: Sequence[str]
    lines: Sequence[Line]
    now: int | None = None
    limit: float | None = None
    limit_name: str = ""


def drawn(plot: Plot, width: int = _WIDTH, height: int = _HEIGHT) -> str:
    """Draw the plot as text, with a legend below it."""
    columns = max(10, width - _AXIS)
    top = _top(plot)
    places = [round(share * (columns - 1)) for share in _shares(plot.sizes)]
    lines = [styled(plot.title, bold=True)]
    for number, row in enumerate(_canvas(plot, places, top, columns, height)):
        at = top * (height - 1 - number) / (height - 1)
        label = f"{100 * at:.0f} %" if number in (0, height // 2, height - 1) else ""
        text = "".join(styled(one, colour) if colour else one for one, colour in row).rstrip()
        lines.append(f"{label:>{_AXIS - 2}} │{text}")
    lines.append(" " * (_AXIS - 1) + "└" + "─" * (columns - 1))
    lines.append(_below(plot, places, columns))
    legend = [styled(f"{_mark(number)} {line.name}", _colour(number)) for number, line in enumerate(plot.lines)]
    if plot.limit is not None:
        legend.append(f"┈ {plot.limit_name} {100 * plot.limit:.1f} %")
    if plot.now is not None:
        legend.append("┊ now")
    lines.append(" " * _AXIS + "   ".join(legend))
    return "\n".join(lines)


def _canvas(plot: Plot, places: Sequence[int], top: float, columns: int, height: int) -> list[list[_Cell]]:
    """Return the characters with their colours, row by row."""
    cells: list[list[_Cell]] = [[(" ", None)] * columns for _ in range(height)]
    if plot.now is not None:
        for row in cells:
            row[places[plot.now]] = ("┊", None)
    if plot.limit is not None:
        cells[_row(plot.limit, top, height)] = [("┈", None)] * columns
    for number, line in enumerate(plot.lines):
        for (at, column), bits in _dots(line, places, top, height).items():
            before = ord(cells[at][column][0]) - _BLANK
            merged = bits | (before if 0 < before <= 0xFF else 0)
            cells[at][column] = (chr(_BLANK + merged), _colour(number))
    for number, line in reversed(list(enumerate(plot.lines))):
        for place, ratio in zip(places, line.ratios, strict=True):
            if ratio is not None:
                cells[_row(ratio, top, height)][place] = (_mark(number), _colour(number))
    return cells


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _mark(number: int) -> str:
    return _MARKS[number % len(_MARKS)]


def _top(plot: Plot) -> float:
    ratios = [ratio for line in plot.lines for ratio in line.ratios if ratio is not None]
    highest = max([*ratios, plot.limit or 0.0], default=0.0)
    return min(1.0, max(0.05, math.ceil(highest * 20 + 0.1) / 20))


def _shares(sizes: Sequence[int]) -> list[float]:
    """Return the place of each size between the first (0) and the last (1), on a logarithmic scale."""
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])
    return [(math.log2(size) - first) / (last - first) if last > first else 0.5 for size in sizes]


def _row(ratio: float, top: float, height: int) -> int:
    return height - 1 - round(min(1.0, ratio / top) * (height - 1))


def _dots(line: Line, places: Sequence[int], top: float, height: int) -> dict[tuple[int, int], int]:
    """Return the braille bits of the straight lines between neighbouring points, by row and column."""
    found: dict[tuple[int, int], int] = {}
    known = [(place, ratio) for place, ratio in zip(places, line.ratios, strict=True) if ratio is not None]
    for (left, low), (right, high) in pairwise(known):
        for step in range(2 * left, 2 * right + 1):
            share = (step - 2 * left) / max(1, 2 * (right - left))
            ratio = low + share * (high - low)
            dot = round((1 - min(1.0, ratio / top)) * (4 * (height - 1))) + 2
            row, column = min(height - 1, dot // 4), step // 2
            found[row, column] = found.get((row, column), 0) | _DOTS[dot % 4][step % 2]
    return found


def _below(plot: Plot, places: Sequence[int], columns: int) -> str:
    """Return the line of size labels. It has as many as fit, and always that of the present size."""
    text = [" "] * (_AXIS + columns + 8)
    wanted = list(range(len(plot.labels)))
    if plot.now is not None:
        wanted.insert(0, plot.now)
    for number in wanted:
        label = plot.labels[number]
        begin = max(0, min(_AXIS + places[number] - len(label) // 2, len(text) - len(label)))
        end = begin + len(label)
        if all(char == " " for char in text[max(0, begin - 1) : end + 1]):
            text[begin:end] = label
    return "".join(text).rstrip()


@click.group()
def plot() -> None:
    """Draw the hits of a pool by its size."""


@plot.command()
@pool_flag
@remote
def curve(call: Invocation) -> None:
    """Draw what a pool of other sizes would have hit lately.

    Exits with code 3 while there is not enough evidence for a curve.
    """
    from kvstow_api.client import routes

    with call.client() as client:
        view = client.call(routes.get_pool_curve, pool=chosen_pool(client, call.pool))
    if not view.items:
        raise CommandError(view.advice, "`kvstow get curve` shows what is known", ExitCode.NOT_READY)
    click.echo(f"{drawn(of_curve(view), min(100, get_terminal_size().columns))}\n")
    click.echo("\n".join(filter(None, (view.advice, view.disk_advice))))


def of_curve(view: PoolCurveView) -> Plot:
    """The hits of each size, and of the largest one."""
    return Plot(
        title=f"pool {view.pool}: % of the blocks that hit, by size",
        sizes=[size.num_slots for size in view.items],
        labels=[format_size(size.num_bytes) for size in view.items],
        lines=[Line(f"policy {view.policy}", [size.ratio for size in view.items])],
        now=next((number for number, size in enumerate(view.items) if size.times == 1), None),
        limit=view.everything,
        limit_name="the largest size",
    )
