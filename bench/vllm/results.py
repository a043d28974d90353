"""Results as they come: a line of JSON each, on the terminal and in a file of `--out`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.report import Table
from bench.vllm.engines import CONNECTORS
from bench.vllm.process import MeasurementError

_ERROR = 3000  # characters, the last ones


@dataclass(frozen=True, slots=True)
class Results:
    path: Path

    def add(self, kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, **values})
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")

    def attempt(self, kind: str, measure: Callable[[], Any], **labels: Any) -> Any:
        """What `measure` returns, a dataclass, is written down; None if it fails, which is written down, too."""
        try:
            measured = measure()
        except MeasurementError as error:
            self.add("failed", of=kind, **labels, error=str(error)[-_ERROR:])
            return None
        self.add(kind, **labels, **asdict(measured))
        return measured

    def show(self, table: Table) -> None:
        text = table.to_markdown()
        print(f"{text}\n", flush=True)
        with self.path.with_suffix(".md").open("a") as file:
            file.write(text + "\n\n")


def open_results(name: str, options: argparse.Namespace) -> Results:
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / f"{name}.jsonl")
    results.add("options", **{key: str(value) for key, value in vars(options).items()})
    return results


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", ".")), metavar="DIR", help="default: $OUT, or here"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a model and a load for two CPU cores: tries the program, measures nothing"
    )


def add_connectors(parser: argparse.ArgumentParser, default: list[str]) -> None:
    parser.add_argument(
        "--connectors",
        nargs="+",
        choices=CONNECTORS,
        default=default,
        help=f"in this order, each time in a new process; default: {' '.join(default)}",
    )
    parser.add_argument(
        "--extra", type=json.loads, default={}, metavar="JSON", help="more options of KVStow's connector"
    )
