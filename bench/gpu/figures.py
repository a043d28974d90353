"""The output of a benchmark: figures as JSON, with a description of the machine, and tables on the terminal."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.report import Table
from kvstow.devices.cuda.driver import load_driver


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine. `driver` is the newest CUDA version that the driver supports, such as 13000 for 13.0. `cuda` is the
    version with which torch was built."""

    day: str
    gpu: str
    driver: int
    cuda: str
    torch: str
    cpus: int


def this_machine() -> Machine:
    day = datetime.now(UTC).date().isoformat()
    gpu, cuda = torch.cuda.get_device_name(0), str(torch.version.cuda)
    return Machine(day, gpu, load_driver().version, cuda, torch.__version__, os.cpu_count() or 0)


def add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", ".")), metavar="DIR", help="default: $OUT, or here"
    )


def write(path: Path, **figures: Sequence[Any]) -> None:
    """Write figures to `path`. `figures` are lists of dataclasses, by name."""
    lists = {name: [asdict(entry) for entry in entries] for name, entries in figures.items()}
    path.write_text(json.dumps({"machine": asdict(this_machine())} | lists, indent=1))


def show(*tables: Table) -> None:
    for table in tables:
        print(f"{table.to_markdown()}\n", flush=True)
