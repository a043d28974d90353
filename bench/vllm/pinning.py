"""What growing a pool costs the steps of its own engine, against the steps of the same engine when nothing is pinned.

    python3 -m bench.vllm pinning [--shapes 8b tp8] [--graphs decode] [--gib 8] [--turns 5] [--processes 3] [--out DIR]

One engine and its worker in one process. One request is decoded all the time while the pool takes turns: it grows by
`--gib`, stays for as many steps, and is given back. Steps of a turn are compared with each other, because a shared
machine changes its speed within minutes. `first` is the time to the first token of 16,000 unknown ones, while the pool
grows and while it stays. With `--cold` the first process has a pool of that size from the start, and its steps while
that is pinned are measured too. Writes `pinning.jsonl` and `pinning.md`.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from bench.report import Table, verdict
from bench.vllm import admin
from bench.vllm.engines import GIB, Setup, start_llm
from bench.vllm.model import SHAPES, write_model
from bench.vllm.process import run
from bench.vllm.results import add_common, add_engine, open_results

P50_BAR, P99_BAR, FIRST_BAR = 1.05, 2.0, 1.02  # times; ms; times

_TIMEOUT = 400.0
_SKIPPED = 3  # steps of a request: its prompt, and what the first answers bring along
_LEAST = 16  # steps of a phase that are worth a comparison
_SMALL_GIB = 1.0
_CHUNK_BYTES = 64 << 20  # a pool gives back whole chunks
_RESIZE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """`most`: steps of a phase. `prompt`: tokens of what is decoded; `cold_prompt`: of the prompts for `first`."""

    most: int = 2000
    prompt: int = 512
    cold_prompt: int = 16000


FULL, TINY = Load(), Load(most=60, prompt=64, cold_prompt=200)


@dataclass(frozen=True, slots=True)
class Phase:
    """Milliseconds of the steps of one phase, and how fast the pool grew meanwhile."""

    p50: float
    p99: float
    steps: int
    gib_per_second: float


@dataclass(frozen=True, slots=True)
class Turn:
    pinning: Phase
    still: Phase


@dataclass(frozen=True, slots=True)
class Pinning:
    """`cold`: while the pool that the engine starts with is pinned, and as many steps afterwards.

    `first_*`: milliseconds until the first token of a prompt, in pairs. `idle_gib_per_second`: while no request runs.
    """

    start_seconds: float
    cold: Turn | None
    turns: list[Turn]
    first_pinning: list[float]
    first_still: list[float]
    idle_gib_per_second: float


def measure(setup: Setup, load: Load, vocabulary: int, num_bytes: int, turns: int, *, is_cold: bool) -> Pinning:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    started = start_llm(setup)
    assert started.port is not None
    decode = _Decode(started.engine, load, vocabulary)
    cold = decode.turn() if is_cold else None
    small = setup.pool_bytes - num_bytes * is_cold
    large = small + num_bytes
    decode.request(load.cold_prompt, 8)
    admin.wait_until_pinned(started.port, _TIMEOUT)
    measured = []
    for _ in range(turns):
        decode.resize(started.port, large)
        measured.append(decode.turn())
        decode.resize(started.port, small)
    firsts: tuple[list[float], list[float]] = [], []
    for _ in range(turns):
        decode.resize(started.port, large)
        firsts[0].append(decode.first_token())
        decode.until_pinned()
        firsts[1].append(decode.first_token())
        decode.resize(started.port, small)
    decode.settle()
    began = time.perf_counter()
    admin.change(started.port, "/v1/pools/host", {"capacity_bytes": large})
    while _pool().status().target_bytes < large - _pool().slot_bytes:
        time.sleep(0.001)
    admin.wait_until_pinned(started.port, _TIMEOUT)
    return Pinning(started.seconds, cold, measured, *firsts, num_bytes / GIB / (time.perf_counter() - began))


def _pool() -> Any:
    """The pool of the worker in this process."""
    return get_kv_transfer_group()._rank.side.plane.pool


class _Decode:
    def __init__(self, llm: Any, load: Load, vocabulary: int) -> None:
        self._engine, self._load, self._vocabulary = llm.llm_engine, load, vocabulary
        self._chance, self._number = random.Random(0), 0
        self.request(load.prompt, 2 * _SKIPPED)

    def turn(self) -> Turn:
        """Steps until the pool is pinned, and as many when it is."""
        pinning = self.until_pinned()
        return Turn(pinning, self._phase(lambda steps: steps < max(pinning.steps, _LEAST)))

    def resize(self, port: int, num_bytes: int) -> None:
        """Until the rank has begun to grow, or has given everything back: stores under way end with steps, so there
        must be some."""
        admin.change(port, "/v1/pools/host", {"capacity_bytes": num_bytes})
        deadline = time.perf_counter() + _RESIZE_SECONDS
        while not self._follows(num_bytes):
            if time.perf_counter() > deadline:
                raise TimeoutError(f"the pool did not follow a resize to {num_bytes} bytes: {_pool().status()}")
            self.settle()

    def settle(self) -> None:
        """Let steps go by, in which stores end."""
        self.request(self._load.prompt, 4)

    def _follows(self, num_bytes: int) -> bool:
        pool, status = _pool(), _pool().status()
        is_wanted = abs(status.target_bytes - num_bytes) <= pool.slot_bytes
        return is_wanted and bool(status.state == "pinning" or status.resident_bytes <= num_bytes + _CHUNK_BYTES)

    def until_pinned(self) -> Phase:
        return self._phase(lambda steps: _pool().status().state == "pinning")

    def first_token(self) -> float:
        return self.request(self._load.cold_prompt, 1)[0]

    def request(self, tokens: int, answer: int, going: Callable[[int], bool] = lambda steps: True) -> list[float]:
        """Milliseconds of the steps, the first one with the prompt, for as long as `going(steps so far)`."""
        self._number += 1
        prompt = [self._chance.randrange(10, self._vocabulary) for _ in range(tokens)]
        params = SamplingParams(max_tokens=answer, temperature=0, detokenize=False, ignore_eos=True)
        name = str(self._number)
        last = time.perf_counter()
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        steps: list[float] = []
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            if outputs and len(outputs[0].outputs[0].token_ids) > len(steps):
                now = time.perf_counter()
                steps.append((now - last) * 1e3)
                last = now
                if not going(len(steps)):
                    self._engine.abort_request([name])
        return steps

    def _phase(self, going: Callable[[int], bool]) -> Phase:
        pool = _pool()
        began, before = time.perf_counter(), pool.status().pinned_bytes
        steps = self.request(self._load.prompt, self._load.most, going)[_SKIPPED:] or [float("nan")]
        rate = (pool.status().pinned_bytes - before) / GIB / (time.perf_counter() - began)
        p50, p99 = (float(value) for value in np.percentile(steps, [50, 99]))
        return Phase(p50, p99, len(steps), rate)


def table(runs: Sequence[tuple[str, Pinning]]) -> Table:
    rows = []
    for name, run_ in runs:
        turns = [turn for turn in run_.turns if turn.pinning.steps >= _LEAST]
        for what, some in (("cold memory", [run_.cold] if run_.cold else []), ("resized", turns)):
            if some:
                rows.append([f"{name}, {what}", *_cells(some)])
        if run_.first_still:
            ratio = statistics.median(run_.first_pinning) / statistics.median(run_.first_still)
            cells = [f"{statistics.median(run_.first_still):.0f}", f"{statistics.median(run_.first_pinning):.0f}"]
            rows.append([f"{name}, first token", *cells, f"{ratio:.3f}, {verdict(ratio <= FIRST_BAR)}", "", "", ""])
    head = ["", "still: p50, ms", "pinning", f"ratio, bar {P50_BAR}", f"p99 longer, bar {P99_BAR} ms", "steps", "GiB/s"]
    return Table("Steps of an engine beside its growing pool", head, rows)


def _cells(turns: Sequence[Turn]) -> list[str]:
    ratio = statistics.median(turn.pinning.p50 / turn.still.p50 for turn in turns)
    longer = statistics.median(turn.pinning.p99 - turn.still.p99 for turn in turns)
    return [
        f"{statistics.median(turn.still.p50 for turn in turns):.2f}",
        f"{statistics.median(turn.pinning.p50 for turn in turns):.2f}",
        f"{ratio:.3f}, {verdict(ratio <= P50_BAR)}",
        f"{longer:+.2f}, {verdict(longer <= P99_BAR)}",
        str(sum(turn.pinning.steps for turn in turns)),
        f"{statistics.median(turn.pinning.gib_per_second for turn in turns):.2f}",
    ]


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    results, load = open_results("pinning", options), TINY if options.tiny else FULL
    num_bytes = int((0.02 if options.tiny else options.gib) * GIB)
    runs: list[tuple[str, Pinning]] = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in ["tiny"] if options.tiny else options.shapes:
            write_model(Path(folder) / shape, SHAPES[shape], weights=False)
            small = int((0.005 if options.tiny else _SMALL_GIB) * GIB)
            setup = Setup(
                Path(folder) / shape,
                "kvstow",
                pool_bytes=small,
                max_tokens=4096 if options.tiny else 32768,
                gpu_blocks=None if options.tiny else 4096,
                graphs=options.graphs,
                graph_sizes=(1,),
                extra={"max_bytes": small + max(num_bytes, int(options.cold * GIB)), **options.extra},
            )
            for process in range(options.processes):
                cold = options.cold > 0 and process == 0
                one = replace(setup, pool_bytes=int(options.cold * GIB)) if cold else setup
                arguments = load, SHAPES[shape].vocabulary, num_bytes, options.turns
                once = partial(run, _TIMEOUT, measure, one, *arguments, is_cold=cold)
                labels = {"shape": shape, "graphs": options.graphs, "process": process}
                measured = results.attempt("pinning", once, **labels)
                if measured is not None:
                    runs.append((f"{shape}, graphs {options.graphs}, process {process + 1}", measured))
    results.show(table(runs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.vllm pinning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    shapes = [name for name in SHAPES if name != "tiny"]
    parser.add_argument("--shapes", nargs="+", default=["8b", "tp8"], choices=shapes)
    add_engine(parser, graphs="none")
    parser.add_argument("--gib", type=float, default=8.0, help="that the pool grows by, each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--processes", type=int, default=3, help="of each shape")
    parser.add_argument("--cold", type=float, default=0.0, metavar="GIB", help="pool of the first process at its start")
    return parser
