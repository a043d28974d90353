"""From the SIGKILL of an engine to its successor's first hit in host memory.

    python3 -m bench.vllm restart [--connectors attached kvstow simple offloading] [--shape 8b] [--pool 40] [--out DIR]

An engine answers some prompts of 16,000 tokens, is killed, and is restarted at once in a new process. That process gets
the first prompt again and again until its prefix comes from host memory. The GPU's own prefix cache is emptied each
time. With `attached`, a node service keeps the stored blocks. A connector whose server has its memory is given as JSON,
while that server runs. `nvidia-smi` is called while both engines run. A connector fails if its two engines take longer
than `--limit`, and the next one begins. Writes `restart.jsonl` and `restart.md`.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from vllm import SamplingParams

from bench.report import Table
from bench.vllm.engines import Setup, block_tokens, rank_pool, start_llm
from bench.vllm.node import NodeService, device_processes
from bench.vllm.process import Measurement, MeasurementError
from bench.vllm.results import add_engines, enter_node, make_parser, name_of, open_results, plain_setup, shape_of

_LIMIT = 120.0  # seconds for both engines, which take 80 if the first start of a machine is among them
_SETTLING = 60.0
_LEAST = 0.9  # the share of a prompt that makes a hit


@dataclass(frozen=True, slots=True)
class Load:
    prompts: int = 4
    tokens: int = 16000


FULL, TINY = Load(), Load(prompts=2, tokens=640)


@dataclass(frozen=True, slots=True)
class Successor:
    """Seconds from the SIGKILL: until the engine was up, until its first answer, and until the first answer whose
    prefix came from host memory. `first_cached` is how many tokens of the first prompt were not computed.
    `prompts_kept` counts the prompts that hit when they were first sent again. `on_gpu` is the number of processes that
    `nvidia-smi` listed, and `service_on_gpu` says whether the node service was one of them."""

    up: float
    first_answer: float
    first_hit: float
    first_cached: int
    prompts_kept: int
    prompts: int
    on_gpu: int
    service_on_gpu: bool


@dataclass(frozen=True, slots=True)
class _Engine:
    setup: Setup
    load: Load
    vocabulary: int
    limit: float

    def prompts(self) -> list[list[int]]:
        chance = random.Random(0)
        sizes = [self.load.tokens] * self.load.prompts
        return [[chance.randrange(10, self.vocabulary) for _ in range(size)] for size in sizes]

    def store(self, ready: Path) -> None:
        """Answer prompts, let all stores end, make the file `ready`, and wait to be killed."""
        client = _Client(self.setup)
        for prompt in self.prompts():
            client.cached(prompt)
        for number in range(6):
            client.cached([number + 5] * 200)
        time.sleep(1.0)
        client.cached([5] * 40)
        ready.touch()
        time.sleep(self.limit)

    def succeed(self, killed_at: float, service: int) -> Successor:
        client = _Client(self.setup)
        up = time.perf_counter()
        first, *others = self.prompts()
        first_cached = client.cached(first)
        first_answer = time.perf_counter()
        first_hit, cached = first_answer, first_cached
        while cached < _LEAST * len(first):
            client.forget_gpu()
            cached = client.cached(first)
            first_hit = time.perf_counter()
        listed = device_processes()
        counts = [first_cached, *(client.cached(prompt) for prompt in others)]
        return Successor(
            up - killed_at,
            first_answer - killed_at,
            first_hit - killed_at,
            first_cached,
            sum(count >= _LEAST * self.load.tokens for count in counts),
            self.load.prompts,
            len(listed),
            service in listed,
        )


class _Client:
    def __init__(self, setup: Setup) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        started = start_llm(setup)
        self._engine = started.engine
        if setup.connector in ("kvstow", "attached"):
            self._wait(lambda: rank_pool().pinned_slots > 0, "the first memory")

    def cached(self, prompt: list[int]) -> int:
        """Send a prompt, and return how many of its tokens were not computed."""
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)
        (output,) = self._engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return int(output.num_cached_tokens or 0)

    def forget_gpu(self) -> None:
        self.cached([7] * 40)
        self._wait(self._engine.reset_prefix_cache, "an empty prefix cache")

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition, and send short requests meanwhile. Engines learn of ended work in steps, and without a
        request vLLM makes no steps for most connectors."""
        deadline = time.perf_counter() + _SETTLING
        while not condition():
            if time.perf_counter() > deadline:
                raise TimeoutError(f"{what} did not come about within {_SETTLING:g} s")
            self.cached([7] * 40)


def measure(engine: _Engine, service: NodeService | None, folder: Path) -> Successor:
    """Measure a restart. Raises `MeasurementError`, at the latest when the engine's limit is over."""
    deadline = time.monotonic() + engine.limit
    ready = folder / f"ready-{time.monotonic_ns()}"
    first = Measurement(engine.store, ready)
    try:
        while not ready.exists():
            if first.is_over:
                first.result(0.0)
            if time.monotonic() > deadline:
                raise MeasurementError(f"the first engine has not answered within {engine.limit:g} s")
            time.sleep(0.05)
    finally:
        killed_at = time.perf_counter()
        first.kill()
    successor = Measurement(engine.succeed, killed_at, 0 if service is None else service.pid)
    return successor.result(max(deadline - time.monotonic(), 0.0))


def table(runs: Sequence[tuple[str, Successor]]) -> Table:
    rows = [
        [
            name,
            f"{one.up:.1f} s",
            f"{one.first_answer:.1f} s",
            f"{one.first_hit:.1f} s",
            f"{one.prompts_kept}/{one.prompts}",
            f"{'yes' if one.service_on_gpu else 'no'} (of {one.on_gpu})",
        ]
        for name, one in runs
    ]
    head = [
        "connector",
        "engine up",
        "first answer",
        "first hit in host memory",
        "prompts kept",
        "service on the GPU",
    ]
    return Table("From the SIGKILL of an engine to its successor", head, rows)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    results, load = open_results("restart", options), TINY if options.tiny else FULL
    runs = []
    gpu_blocks = (load.prompts + 1) * load.tokens // block_tokens()
    with plain_setup(options, max_tokens=2 * load.tokens, gpu_blocks=gpu_blocks) as setup:
        vocabulary = shape_of(options).vocabulary
        for connector in options.connectors:
            with ExitStack() as stack:

                def once(connector: str = connector, stack: ExitStack = stack) -> Successor:
                    service = enter_node(stack, setup.pool_bytes) if connector == "attached" else None
                    extra = {**options.extra, **({"weights_id": "restart"} if service is not None else {})}
                    node = None if service is None else service.node
                    one = replace(setup, connector=connector, node=node, extra=extra)
                    return measure(_Engine(one, load, vocabulary, options.limit), service, one.model)

                name = name_of(connector)
                measured = results.attempt("restart", once, connector=name, graphs=options.graphs)
                if measured is not None:
                    runs.append((name, measured))
    results.show(table(runs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("restart", __doc__, shape=True)
    add_engines(parser, ["attached", "kvstow", "simple", "offloading"], pool=40.0, graphs="none")
    parser.add_argument("--limit", type=float, default=_LIMIT, metavar="SECONDS", help="of each connector")
    return parser
