"""Time to first token of a hit by the way of its load: within the step that computes, layer by layer, or before it.

    python3 -m bench.vllm paths [--shape 8b] [--prefix 16000 ...] [--new 7 256 2048] [--graphs full]
        [--connector attached] [--ranks 2] [--attention FLASH_ATTN] [--rounds 6] [--pool 12] [--out DIR]

One engine is measured. In each round, a prompt with a known prefix and its own new tokens is sent four times. Its
prefix is only in host memory the first three times, and is loaded by layer ("layer"), before the step ("async") and by
the policy's choice ("auto"). Then it is on the GPU ("gpu"). The bar of a load by layer is 1.2 times the longer of two
times, "gpu" and that of the prefix on nine tenths of the link, plus 2 ms. If the new tokens fill no block, answers of
eight tokens by all four ways are compared. The same few milliseconds of Python are timed beside each, because eager
steps are as fast as their host. Writes `paths.jsonl` and `paths.md`.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from bench.report import Table, verdict
from bench.vllm.engines import ATTENTION, Setup, block_tokens, start_llm, wait_until_usable
from bench.vllm.hits import Client, host_ms, measure_link
from bench.vllm.process import run
from bench.vllm.results import add_engine, enter_node, make_parser, open_results, plain_setup, shape_of

_PINNING, _PATIENCE, _TIMEOUT = 90.0, 20.0, 500.0
_PREFIXES = 2
_LINK, _FACTOR, _MORE = 0.9, 1.2, 2.0
PATHS = ("layer", "async", "auto", "gpu")


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds to the first token, all of them in turn, by way. `host` are the times of the loop of Python beside
    each. `cached` is the smallest number of tokens that a hit found. `chosen` counts loads by their way and its
    reason."""

    prefix: int
    new_tokens: int
    times: dict[str, list[float]]
    host: dict[str, list[float]]
    cached: int
    chosen: dict[str, int]
    same: int | None = None
    """In how many rounds all ways gave the same answer."""


@dataclass(frozen=True, slots=True)
class Paths:
    rows: list[Row]


def measure(setup: Setup, lengths: Sequence[int], new: Sequence[int], rounds: int, vocabulary: int) -> Paths:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    started = start_llm(setup)
    wait_until_usable(started, setup, _PINNING)
    client, chance = Client(started.engine, vocabulary), random.Random(0)
    engine = started.engine.llm_engine.engine_core.engine_core
    policy = engine.scheduler.connector._host.side.policy

    def ask(path: str, prompt: list[int], tokens: int = 1) -> Any:
        if path != "gpu":
            ends = time.monotonic() + _PATIENCE
            while not started.engine.reset_prefix_cache():  # it fails while blocks are being stored
                if time.monotonic() > ends:
                    raise TimeoutError("the GPU's prefix cache cannot be emptied")
                started.engine.llm_engine.step()
            policy._path = path
        return client.ask(prompt, tokens)

    def gave_the_same(start: list[int], tokens: int) -> bool:
        prompt = start + client.prompt(chance, tokens)
        return len({ask(path, prompt, 8).tokens for path in PATHS}) == 1

    rows = []
    for prefix in lengths:
        prefixes = [client.prompt(chance, prefix) for _ in range(_PREFIXES)]
        for each in prefixes:
            client.ask(each)
        client.drain(chance)
        for tokens in new:
            times, host = ({path: list[float]() for path in PATHS} for _ in range(2))
            cached = prefix
            policy.counts.clear()
            for number in range(rounds + 1):
                for path in PATHS:
                    answer = ask(path, prefixes[number % _PREFIXES] + client.prompt(chance, tokens))
                    if number:  # the first round compiles kernels, so it does not count
                        times[path].append(answer.seconds * 1e3)
                        host[path].append(host_ms())
                        cached = min(cached, answer.cached)
            chosen = {one.label: count for one, count in policy.counts.items()}
            same = None
            if tokens < block_tokens():
                same = sum(gave_the_same(prefixes[number % _PREFIXES], tokens) for number in range(rounds))
            rows.append(Row(prefix, tokens, times, host, cached, chosen, same))
    return Paths(rows)


def table(title: str, token_bytes: int, link: float | None, rows: Sequence[Row]) -> Table:
    head = [
        "prefix, new tokens",
        "on the link, ms",
        "on the GPU, ms",
        "by layer, ms",
        "before the step, ms",
        "by the policy, ms",
    ]
    head += ["layer / before", "of its bar", "same answers", "loop of the host, ms"]
    lines = []
    for row in rows:
        on_link = None if link is None else row.prefix * token_bytes / link / 1e6
        found = {path: statistics.median(times) for path, times in row.times.items()}
        bar = None if on_link is None else _FACTOR * max(found["gpu"], on_link / _LINK) + _MORE
        of_bar = "" if bar is None else f"{found['layer'] / bar:.2f}, {verdict(found['layer'] <= bar)}"
        cells = [f"{found[p]:.1f} ({min(row.times[p]):.1f} to {max(row.times[p]):.1f})" for p in ("gpu", *PATHS[:3])]
        loops = " / ".join(f"{statistics.median(row.host[path]):.1f}" for path in ("gpu", *PATHS[:3]))
        first = [f"{row.prefix:,}, {row.new_tokens:,}", "" if on_link is None else f"{on_link:.1f}"]
        lines.append([*first, *cells, f"{found['layer'] / found['async']:.2f}", of_bar])
        lines[-1] += ["" if row.same is None else f"{row.same} of {len(row.times['gpu'])}", loops]
    return Table(title, head, lines)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    results = open_results("paths", options)
    link = None if options.tiny else results.attempt("link", lambda: run(60, measure_link))
    shape = shape_of(options)
    lengths, new = ([320, 640], [7, 64]) if options.tiny else (options.prefix, options.new)
    longest = max(lengths) + max(new) + 64
    arguments = lengths, new, options.rounds, shape.vocabulary
    labels = {name: getattr(options, name) for name in ("shape", "connector", "ranks", "graphs", "attention")}
    with ExitStack() as stack:
        plain = plain_setup(
            options,
            config={"max_position_embeddings": max(65536, longest)},
            max_tokens=longest,
            gpu_blocks=2 * (longest + 1024) // block_tokens() + 256,
            ranks=options.ranks,
        )
        setup = replace(stack.enter_context(plain), connector=options.connector)
        if options.connector == "attached":
            setup = replace(setup, node=enter_node(stack, setup.pool_bytes).node)
        found = results.attempt("paths", lambda: run(_TIMEOUT, measure, setup, *arguments), **labels)
    if found is not None:
        title = f"{options.shape}, {options.connector}, {options.attention}, graphs: {options.graphs}"
        title += f", {options.ranks} GPUs" if options.ranks > 1 else ""
        results.show(table(title, shape.token_bytes(), None if link is None else link.gb_per_second, found.rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("paths", __doc__, shape=True)
    parser.add_argument("--prefix", type=int, nargs="+", default=[16000], help="tokens; default: 16000")
    parser.add_argument("--new", type=int, nargs="+", default=[7, 256, 2048], help="tokens after it")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--connector", choices=["kvstow", "attached"], default="kvstow")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs (tensor parallel)")
    parser.add_argument("--attention", default=ATTENTION, help="vLLM's attention backend; default: %(default)s")
    parser.add_argument("--pool", type=float, default=12.0, metavar="GIB", help="host memory")
    add_engine(parser, graphs="none")
    return parser
