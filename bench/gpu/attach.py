"""An attached engine on a GPU: how soon it has slots, how fast it registers memory, and the rate of its copies.

    OUT=/tmp/out python -m bench.gpu.attach [--gib 40] [--moved-gib 2] [--tiny]

The service is a process without CUDA, and its memory is populated before the engine starts. Rates are relative to that
of one plain `cudaMemcpyAsync` of the same number of bytes, to and from a pinned buffer, in the same process. `--tiny`
tries the program on the CPU. Writes `attach.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.gpu.attachrank import SLOT_BYTES
from bench.program import answer_of, running
from bench.report import Table, verdict

GIB, MIB = 1 << 30, 1 << 20
PAGES = ("huge", "small")
_RATE_BAR, _FIRST_BAR, _REGISTERED_BAR = 0.95, 0.050, 4.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=40.0, help="memory of the service")
    parser.add_argument("--moved-gib", type=float, default=2.0, help="bytes that each copy moves")
    parser.add_argument("--tiny", action="store_true", help="tries the program, on the CPU; measures nothing")
    options = parser.parse_args()
    num_bytes, moved = (256 * MIB, 64 * MIB) if options.tiny else (options.gib * GIB, options.moved_gib * GIB)
    found = {pages: measure(int(num_bytes), int(moved), pages, tiny=options.tiny) for pages in PAGES}
    out = Path(os.environ.get("OUT", "."))
    (out / "attach.json").write_text(json.dumps(found, indent=1))
    print(table(found, int(moved)).to_markdown())
    return 0


def measure(num_bytes: int, moved: int, pages: str, *, tiny: bool) -> dict[str, Any]:
    with TemporaryDirectory(prefix="kvstow-bench-") as folder:
        path = f"{folder}/run/attach.sock"
        with running("bench.gpu.attachnode", path, str(num_bytes), pages) as node:
            populated = answer_of(node)
            more = ("tiny",) if tiny else ()
            with running("bench.gpu.attachrank", path, str(num_bytes), str(moved), *more) as rank:
                found = answer_of(rank)
    print(pages, found, flush=True)
    return {**found, "populated": populated["seconds"], "small_page_bytes": populated["small_page_bytes"]}


def table(found: dict[str, dict[str, Any]], moved: int) -> Table:
    rows = []
    for pages, figures in found.items():
        shares = [figures[f"plain_{way}"] / figures[way] for way in ("store", "load")]
        rates = [
            f"{share:.3f} ({moved / figures[way] / 1e9:.1f} GB/s)"
            for share, way in zip(shares, ("store", "load"), strict=True)
        ]
        first, registered = figures["first"], figures["registered"]
        size = figures["slots"] * SLOT_BYTES / GIB
        met = [min(shares) >= _RATE_BAR, first <= _FIRST_BAR, registered <= _REGISTERED_BAR]
        rows.append(
            [
                "2 MiB" if pages == "huge" else "4 KiB",
                *rates,
                f"{first * 1e3:.0f} ms",
                f"{size:.1f} GiB in {registered:.2f} s",
                " / ".join(map(verdict, met)),
            ]
        )
    head = ["pages", "store, part of the link", "load, part of the link", "first slots", "registered, idle"]
    return Table("An attached engine on a GPU", [*head, "bars 0.95, 50 ms, 4 s for 40 GiB"], rows)


if __name__ == "__main__":
    sys.exit(main())
