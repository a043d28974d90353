"""Runs the demo, as `python -m kvstow_service.demo` or `make demo`. It takes less than half a minute on an idle
machine.

It starts a real `kvstow serve` and replays a generated trace through engines in processes of their own, which attach to
the service. It kills an engine and the service in the middle. The exit status is 0 only if all claims of the summary
hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from kvstow_service.demo.processes import DemoError
from kvstow_service.demo.story import Claim, Scale, Story


def main(scale: Scale = Scale()) -> int:  # noqa: B008 - frozen
    """Run the demo, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvstow_service.demo", description="Run KVStow's demo.")
    parser.add_argument("--svg", type=Path, help="also write the output to this SVG file")
    svg: Path | None = parser.parse_args().svg
    console = Console(record=True, force_terminal=True, width=110) if svg else Console()
    begun = time.monotonic()

    def say(text: str) -> None:
        console.print(
            f"{time.monotonic() - begun:5.1f} s  {text}", highlight=False, markup=False, soft_wrap=svg is None
        )

    try:
        with tempfile.TemporaryDirectory(prefix="kvstow-demo-") as folder:
            claims = Story(Path(folder), scale, say).run()
    except (DemoError, httpx.HTTPError) as error:
        console.print(f"demo failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    holds = print_claims(claims, console)
    if svg:
        console.save_svg(str(svg), title="make demo")
    return 0 if holds else 1


def print_claims(claims: list[Claim], console: Console) -> bool:
    """Print a summary. Returns whether all claims hold."""
    if console.is_terminal:
        table = Table(title="What was claimed, and what was seen", title_justify="left", show_lines=True)
        for name in ("claim", "seen", ""):
            table.add_column(name)
        for claim in claims:
            table.add_row(claim.text, claim.seen, "[green]yes" if claim.holds else "[red]NO")
        console.print(table)
    else:
        for claim in claims:
            line = f"{'yes' if claim.holds else 'NO':4}{claim.text}: {claim.seen}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    holds = all(claim.holds for claim in claims)
    failed = sum(not claim.holds for claim in claims)
    if holds:
        console.print(f"All {len(claims)} claims hold.", style="green", highlight=False)
    else:
        console.print(f"{failed} of {len(claims)} claims do not hold.", style="red", highlight=False)
    return holds


if __name__ == "__main__":
    sys.exit(main())
