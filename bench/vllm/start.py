"""How much later an engine can take requests with a connector than without.

    python3 -m bench.vllm start [--connectors none kvstow ...] [--graphs full] [--pool 40] [--out DIR]

Each engine starts in a process of its own, that of its worker as well; the connectors take turns, and the best of each
counts: the first engine of a machine compiles kernels. Writes `start.jsonl` and `start.md`.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.report import Table, verdict
from bench.vllm.engines import GIB, Setup, start_llm
from bench.vllm.model import SHAPES, write_model
from bench.vllm.registration import observe_registration, slowest
from bench.vllm.results import add_engines, make_parser, open_results

BAR = 0.5  # seconds above no connector

_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Start:
    """`registration_seconds`: of them, in which vLLM waited for the connector; `functions`: of those, by function."""

    seconds: float
    registration_seconds: float
    functions: dict[str, float] | None = None


def measure(setup: Setup, is_profiled: bool = False) -> Start:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    profile = cProfile.Profile() if is_profiled else None
    with ExitStack() as stack:
        waited = stack.enter_context(observe_registration(profile))
        seconds = start_llm(setup).seconds
        return Start(seconds, waited(), slowest(profile) if profile is not None else None)


def table(runs: Sequence[tuple[str, Start]]) -> Table:
    least = {name: min(start.seconds for other, start in runs if other == name) for name, _ in runs}
    rows = []
    for name, best in least.items():
        mine = [start for other, start in runs if other == name]
        later = best - least["none"] if "none" in least else None
        rows.append(
            [
                name,
                " / ".join(f"{start.seconds:.2f}" for start in mine),
                "" if later is None else f"{later:+.2f} s",
                "" if later is None or name != "kvstow" else f"+{BAR} s, {verdict(later <= BAR)}",
                f"{statistics.median(start.registration_seconds for start in mine):.2f} s",
            ]
        )
    head = ["connector", "starts, s", "the best, above none", "bar", "waiting for the connector"]
    return Table("Until an engine can take requests", head, rows)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    results = open_results("start", options)
    shape = "tiny" if options.tiny else options.shape
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPES[shape], weights=False)
        plain = Setup(
            Path(folder),
            "none",
            pool_bytes=int((0.05 if options.tiny else options.pool) * GIB),
            max_tokens=1024 if options.tiny else 32768,
            gpu_blocks=64 if options.tiny else 8192,
            graphs=options.graphs,
            extra=options.extra,
        )
        runs = results.attempt_each("start", options, _TIMEOUT, measure, plain, options.profile)
    results.show(table(runs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("start", __doc__, shape=True)
    parser.add_argument("--profile", action="store_true", help="list the functions that vLLM waited for")
    add_engines(parser, ["none", "kvstow"] * 3, pool=40.0, graphs="none")
    return parser
