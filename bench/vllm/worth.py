"""Compares the seconds that a pool reports as saved with those that it saves: the same load with KVStow and without.

    python3 -m bench.vllm worth [--connectors none kvstow attached none] [--rounds 2] [--out DIR]

Documents of several lengths come back in each round, in another order and each with a new question. Together they are
several times as large as the GPU's cache. The first round is computed and not counted. Requests wait for their turn at
all times, so the GPU always has work. Saved is the time of the counted rounds without a pool minus that with one:
elapsed time, and time in steps (by CUDA events from the launch of each step's model to its end). Predicted is what the
pool has counted in those rounds: `hit_seconds` minus `load_wait_seconds`. Writes `worth.jsonl` and `worth.md`.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.worker import gpu_worker

from bench.report import Table, verdict
from bench.vllm import admin
from bench.vllm.engines import Setup, block_tokens, start_llm, wait_until_usable
from bench.vllm.results import add_engines, make_parser, open_results, plain_setup, shape_of

BAR = 0.10

_TIMEOUT = 400.0
_PINNING = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """`lengths` are those of the documents. `question` is how many tokens follow each. `at_once` requests run
    together."""

    lengths: tuple[int, ...]
    documents: int
    question: int
    answer: int
    at_once: int
    gpu_tokens: int
    batch_tokens: int


FULL = Load((2048, 6144, 12_288, 24_576), 24, 320, 4, 4, 98_304, 8192)
TINY = Load((128, 256, 384), 24, 40, 2, 2, 1536, 256)


@dataclass(frozen=True, slots=True)
class Worth:
    """Figures of the counted rounds. `predicted` are the pool's own figures, by name."""

    seconds: float
    step_seconds: float
    predicted: dict[str, float] = field(default_factory=dict)


class StepTimes:
    """How long the device was busy with steps."""

    def __init__(self) -> None:
        self._events: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    def take(self) -> float:
        """Return the seconds since the last call."""
        if self._events:
            torch.cuda.synchronize()
        seconds: float = self._seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        self._events, self._seconds = [], 0.0
        return seconds

    @contextmanager
    def step(self) -> Iterator[None]:
        if torch.cuda.is_available():
            make: Any = torch.cuda.Event
            begin, end = make(enable_timing=True), make(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began


def observe_steps() -> StepTimes:
    """From now on, time those steps of this process that compute something."""
    times, execute = StepTimes(), gpu_worker.Worker.execute_model

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            return execute(self, scheduler_output, *args, **kwargs)
        with times.step():
            return execute(self, scheduler_output, *args, **kwargs)

    gpu_worker.Worker.execute_model = execute_model
    return times


def measure(setup: Setup, load: Load, rounds: int, vocabulary: int) -> Worth:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    steps = observe_steps()
    started = start_llm(setup)
    wait_until_usable(started, setup, _PINNING)
    port = setup.node.port if setup.node is not None else started.port
    params = SamplingParams(max_tokens=load.answer, temperature=0, detokenize=False, ignore_eos=True)
    chance = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(10, vocabulary) for _ in range(count)]

    documents = [tokens(load.lengths[number % len(load.lengths)]) for number in range(load.documents)]

    def serve_round() -> float:
        """Serve a round, and return its seconds."""
        chance.shuffle(documents)
        prompts = [{"prompt_token_ids": document + tokens(load.question)} for document in documents]
        began = time.perf_counter()
        started.engine.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    def figures() -> dict[str, float]:
        return dict(admin.ask(port, "/v1/stats")["prefill"]) if port else {}

    serve_round()
    before, _ = figures(), steps.take()
    seconds = sum(serve_round() for _ in range(rounds))
    predicted = {name: value - before[name] for name, value in figures().items()}
    return Worth(seconds, steps.take(), predicted)


def table(runs: Sequence[tuple[str, Worth]]) -> Table:
    """Make the table. For several runs without a pool, the mean counts."""
    plain = [one for name, one in runs if name == "none"]
    rows = []
    for connector, one in runs:
        if not one.predicted or not plain:
            continue
        elapsed = statistics.mean(other.seconds for other in plain) - one.seconds
        in_steps = statistics.mean(other.step_seconds for other in plain) - one.step_seconds
        gross, waited = one.predicted["hit_seconds"], one.predicted["load_wait_seconds"]
        ratio = (gross - waited) / elapsed
        rows.append(
            [
                connector,
                f"{one.predicted['hit_tokens']:.0f}",
                f"{gross:.2f} - {waited:.2f} = {gross - waited:.2f}",
                f"{elapsed:.2f}",
                f"{in_steps:.2f}",
                f"{ratio:.3f}",
                f"within {BAR:.0%}, {verdict(abs(ratio - 1) <= BAR)}",
            ]
        )
    head = [
        "",
        "tokens loaded",
        "predicted s (hits - waiting)",
        "saved s, elapsed",
        "saved s, in steps",
        "ratio",
        "bar",
    ]
    return Table("Seconds of prefill that a pool saves: predicted, and measured without it", head, rows)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    results, load = open_results("worth", options), TINY if options.tiny else FULL
    with plain_setup(
        options,
        max_tokens=max(load.lengths) + load.question + 64,
        gpu_blocks=load.gpu_tokens // block_tokens(),
        batch_tokens=load.batch_tokens,
        batch_requests=load.at_once,
    ) as plain:
        arguments = load, options.rounds, shape_of(options).vocabulary
        runs = results.attempt_each("worth", options, _TIMEOUT, measure, plain, *arguments)
    results.show(table(runs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("worth", __doc__, shape=True)
    add_engines(parser, ["none", "kvstow", "attached", "none"], pool=40.0, graphs="decode")
    parser.add_argument("--rounds", type=int, default=2)
    return parser
