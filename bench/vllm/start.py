"""How much later an engine with a connector can take requests than one without.

    python3 -m bench.vllm start [--connectors none kvstow ...] [--graphs full] [--pool 40] [--out DIR]

Each engine starts in its own process, which also has its worker. The connectors take turns, and the best start of each
counts, because the first engine of a machine compiles kernels. If other processes run on the machine, compare CPU
times. Writes `start.jsonl` and `start.md`.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from bench.report import Table, verdict
from bench.vllm.engines import Setup, start_llm
from bench.vllm.registration import observe_registration, slowest
from bench.vllm.results import add_engines, make_parser, open_results, plain_setup

BARS = {"kvstow": 0.5, "attached": 0.2, "absent": 0.2}  # seconds above the start without a connector

_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Start:
    """`registration_seconds` is the part in which vLLM waited for the connector, and `functions` divides it by
    function. `cpu_seconds` are those of all threads of the process."""

    seconds: float
    registration_seconds: float
    cpu_seconds: float
    functions: dict[str, float] | None = None


def measure(setup: Setup, is_profiled: bool = False) -> Start:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    profile = cProfile.Profile() if is_profiled else None
    with ExitStack() as stack:
        waited = stack.enter_context(observe_registration(profile))
        before = time.process_time()
        started = start_llm(setup)
        used = time.process_time() - before
        return Start(started.seconds, waited(), used, slowest(profile) if profile is not None else None)


def table(runs: Sequence[tuple[str, Start]]) -> Table:
    starts: dict[str, list[Start]] = {}
    for name, start in runs:
        starts.setdefault(name, []).append(start)
    least = {name: min(start.seconds for start in mine) for name, mine in starts.items()}
    used = {name: min(start.cpu_seconds for start in mine) for name, mine in starts.items()}
    rows = []
    for name, mine in starts.items():
        bar = BARS.get(name) if "none" in least else None
        later = least[name] - least.get("none", 0.0)
        rows.append(
            [
                name,
                " / ".join(f"{start.seconds:.2f}" for start in mine),
                f"{later:+.2f} s" if "none" in least else "",
                "" if bar is None else f"+{bar} s, {verdict(later <= bar)}",
                f"{used[name] - used['none']:+.2f} s" if "none" in used else "",
                f"{statistics.median(start.registration_seconds for start in mine):.2f} s",
            ]
        )
    head = ["connector", "starts, s", "the best, above none", "bar", "least CPU time, above none"]
    head.append("waiting for the connector")
    return Table("Until an engine can take requests", head, rows)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    results = open_results("start", options)
    tokens, blocks = (1024, 64) if options.tiny else (32768, 8192)
    with plain_setup(options, max_tokens=tokens, gpu_blocks=blocks) as plain:
        runs = results.attempt_each("start", options, _TIMEOUT, measure, plain, options.profile)
    results.show(table(runs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("start", __doc__, shape=True)
    parser.add_argument("--profile", action="store_true", help="list the functions that vLLM waited for")
    add_engines(parser, ["none", "kvstow"] * 3, pool=40.0, graphs="none")
    return parser
