"""`kvstow plot`: what the server knows as a picture."""

from __future__ import annotations

from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

import click

from kvstow_service.cli.connection import Connection, chosen_pool, pool_flag, remote
from kvstow_service.cli.failures import CommandError, ExitCode

if TYPE_CHECKING:
    from kvstow_api.answers import PoolCurveView
    from kvstow_service.cli.plotting import Plot


@click.group()
def plot() -> None:
    """Draw the hits of a pool by its size."""


@plot.command()
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Write a PNG to this file instead.")
@pool_flag
@remote
def curve(connection: Connection, png: Path | None, pool: str | None) -> None:
    """Draw what a pool of other sizes would have hit lately.

    --png needs matplotlib. Exits with code 3 while there is not enough evidence for a curve.
    """
    from kvstow_api.client import routes
    from kvstow_service.cli.plotting import drawn, save

    with connection.client() as client:
        view = client.call(routes.get_pool_curve, pool=chosen_pool(client, pool))
    if not view.items:
        raise CommandError(
            view.advice, "`kvstow get curve --watch` shows it as soon as it is there", ExitCode.NOT_READY
        )
    found = of_curve(view)
    if png is not None:
        save(found, png)
    else:
        click.echo(f"{drawn(found, min(100, get_terminal_size().columns))}\n")
    click.echo(view.advice)


def of_curve(view: PoolCurveView) -> Plot:
    """The pool's own order, LRU beside it where they differ, and what a pool would hit that never evicts."""
    from kvstow.bytesize import format_size
    from kvstow_service.cli.plotting import Line, Plot

    lines = [Line(f"policy {view.policy}", [size.ratio for size in view.items])]
    if view.policy != "lru":
        lines.append(Line("lru", [size.lru for size in view.items]))
    return Plot(
        title=f"pool {view.pool}: % of the blocks that hit, by size",
        sizes=[size.num_slots for size in view.items],
        labels=[format_size(size.num_bytes) for size in view.items],
        lines=lines,
        now=next((number for number, size in enumerate(view.items) if size.times == 1), None),
        limit=view.everything,
        limit_name="without evictions",
    )
