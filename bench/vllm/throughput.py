"""Output tokens per second of a load that stores all the time and never hits, with KVStow and without.

    python3 -m bench.vllm throughput [--connectors none kvstow none kvstow] [--rounds 2] [--out DIR]

Each round has new prompts. The pool is smaller than their KV, so most stores evict. Each process begins with a quarter
of a round that is not counted. Writes `throughput.jsonl` and `throughput.md`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vllm import SamplingParams

from bench.report import Table, verdict
from bench.vllm import admin
from bench.vllm.engines import GIB, Setup, start_llm, wait_until_usable
from bench.vllm.results import add_engines, make_parser, open_results, plain_setup, shape_of

BAR = 0.99

_TIMEOUT = 300.0
_PINNING = 90.0


@dataclass(frozen=True, slots=True)
class Round:
    requests: int = 128
    prompt_tokens: int = 1024
    answer_tokens: int = 128
    at_once: int = 64


FULL, TINY = Round(), Round(requests=6, prompt_tokens=128, answer_tokens=16, at_once=3)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Output tokens per second of each round."""

    start_seconds: float
    rounds: list[float]
    admin: admin.Summary | None


def measure(setup: Setup, size: Round, rounds: int, vocabulary: int) -> Throughput:
    started = start_llm(setup)
    wait_until_usable(started, setup, _PINNING)
    params = SamplingParams(max_tokens=size.answer_tokens, temperature=0, detokenize=False, ignore_eos=True)
    chance = random.Random(0)

    def rate(requests: int) -> float:
        prompts = [
            {"prompt_token_ids": [chance.randrange(10, vocabulary) for _ in range(size.prompt_tokens)]}
            for _ in range(requests)
        ]
        began = time.perf_counter()
        outputs = started.engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds

    rate(size.requests // 4)
    rates = [rate(size.requests) for _ in range(rounds)]
    return Throughput(started.seconds, rates, admin.summarize(started.port) if started.port else None)


def table(runs: Sequence[tuple[str, Throughput]]) -> Table:
    """Make the table. A run's rate is the median of its rounds. For several runs of a connector, the mean counts."""
    plain = [statistics.median(one.rounds) for name, one in runs if name == "none"]
    rows = []
    for connector in dict.fromkeys(name for name, _ in runs):
        of_it = [one for name, one in runs if name == connector]
        rates = [statistics.median(one.rounds) for one in of_it]
        share = statistics.mean(rates) / statistics.mean(plain) if plain else None
        every = [rate for one in of_it for rate in one.rounds]
        stored = [one.admin.stored_bytes / GIB for one in of_it if one.admin]
        rows.append(
            [
                connector,
                " / ".join(f"{rate:.0f}" for rate in rates),
                f"{min(every):.0f} to {max(every):.0f}",
                "" if share is None else f"{share:.4f}",
                "" if share is None or connector != "kvstow" else f"{BAR}, {verdict(share >= BAR)}",
                " / ".join(f"{gib:.1f}" for gib in stored),
            ]
        )
    head = ["", "output tokens/s, of each process", "rounds", "of none", "bar", "GiB stored"]
    return Table("Throughput of a load that stores and never hits", head, rows)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    results, size = open_results("throughput", options), TINY if options.tiny else FULL
    with plain_setup(
        options,
        tiny_pool=0.005,
        max_tokens=4096 if not options.tiny else 512,
        batch_tokens=8192,
        batch_requests=size.at_once,
        graph_sizes=tuple(range(8, size.at_once + 1, 8)) if not options.tiny else None,
    ) as plain:
        arguments = size, options.rounds, shape_of(options).vocabulary
        runs = results.attempt_each("throughput", options, _TIMEOUT, measure, plain, *arguments)
    results.show(table(runs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("throughput", __doc__, shape=True)
    add_engines(parser, ["none", "kvstow", "none", "kvstow"], pool=16.0, graphs="decode")
    parser.add_argument("--rounds", type=int, default=2)
    return parser
