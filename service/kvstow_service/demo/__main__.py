"""`python -m kvstow_service.demo`, or `make demo`: less than half a minute on an idle machine.

Starts a real `kvstow serve` and replays a generated trace through engines that attach to it, in processes of their
own. An engine and the service are killed in the middle. The exit status is 0 only if everything that the summary claims
was so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import httpx
from rich.console import Console

from kvstow_service.demo.claims import print_claims
from kvstow_service.demo.processes import DemoError
from kvstow_service.demo.story import Scale, Story


def main(scale: Scale = Scale()) -> int:  # noqa: B008 - frozen
    """Exit status of the demo."""
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


if __name__ == "__main__":
    sys.exit(main())
