"""Many simultaneous hits, and requests that decode while hits arrive, by the way of the loads.

    python3 -m bench.vllm crowd [--shape 8b] [--parts burst beside] [--hits 16] [--running 16] [--rounds 3]
        [--budgets 0 10 50] [--pool 40] [--graphs none] [--attention FLASH_ATTN] [--out DIR]

Each part has one engine, in which the ways alternate. "burst": prompts whose prefixes are only in host memory are sent
at once. Measured are the first tokens of the first and the last prompt, and their mean. "beside": requests decode, and
a hit arrives every 30 steps. Measured are the time between two tokens of those requests, and the first token of the
hit, with all loads before the step and with the policy's choice, for each budget (ms). The same few milliseconds of
Python are timed beside each. Writes `crowd.jsonl` and `crowd.md`.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm import SamplingParams

from bench.report import Table
from bench.vllm.engines import ATTENTION, Setup, block_tokens, start_llm, wait_until_usable
from bench.vllm.hits import Client, host_ms
from bench.vllm.process import run
from bench.vllm.results import add_engine, make_parser, open_results, plain_setup, shape_of

_PINNING, _PATIENCE, _TIMEOUT = 90.0, 20.0, 500.0
_NEW = 7  # how many tokens follow each prefix
_SHORT, _LONG = 64, 3000  # tokens of the prompt and of the answer of a request that decodes
_PREFIXES, _ON_GPU = 8, 2  # how many prefixes the hits of "beside" have, and how many of them fit on the GPU
_EVERY = 30  # steps between two hits


@dataclass(frozen=True, slots=True)
class Burst:
    """Milliseconds of each round. `cached` is the smallest number of tokens found."""

    way: str
    first: list[float]
    mean: list[float]
    last: list[float]
    host: list[float]
    cached: int
    chosen: dict[str, int]


@dataclass(frozen=True, slots=True)
class Beside:
    """Milliseconds between two tokens, and to the first token of each hit."""

    way: str
    gaps: list[float]
    hits: list[float]
    host: list[float]
    cached: int
    chosen: dict[str, int]


@dataclass(frozen=True, slots=True)
class Bursts:
    rows: list[Burst]


@dataclass(frozen=True, slots=True)
class Runners:
    rows: list[Beside]


class _Engine:
    """An engine in this process, whose steps are made one by one."""

    def __init__(self, setup: Setup, vocabulary: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        started = start_llm(setup)
        wait_until_usable(started, setup, _PINNING)
        self.llm, self.client, self.chance = started.engine, Client(started.engine, vocabulary), random.Random(0)
        self._core = self.llm.llm_engine
        scheduler = self._core.engine_core.engine_core.scheduler
        self.policy = scheduler.connector._host.side.policy
        self._names = iter(range(1 << 40))

    def prefixes(self, number: int, tokens: int) -> list[list[int]]:
        """Make prefixes that were computed, and that are in host memory."""
        prompts = [self.client.prompt(self.chance, tokens) for _ in range(number)]
        for prompt in prompts:
            self.client.ask(prompt)
        self.client.drain(self.chance)
        return prompts

    def forget_gpu(self) -> None:
        ends = time.monotonic() + _PATIENCE
        while not self.llm.reset_prefix_cache():  # it fails while blocks are being stored
            if time.monotonic() > ends:
                raise TimeoutError("the GPU's prefix cache cannot be emptied")
            self._core.step()

    def add(self, prompt: list[int], tokens: int) -> str:
        name = f"crowd-{next(self._names)}"
        params = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        self._core.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def step(self) -> list[Any]:
        return list(self._core.step())

    def abort(self, names: Sequence[str]) -> None:
        self._core.abort_request(list(names))

    def take_choices(self) -> dict[str, int]:
        counts = {choice.label: count for choice, count in self.policy.counts.items()}
        self.policy.counts.clear()
        return counts


def measure_bursts(setup: Setup, hits: int, prefix: int, rounds: int, vocabulary: int) -> Bursts:
    engine = _Engine(setup, vocabulary)
    prefixes = engine.prefixes(hits, prefix)
    bursts = {way: Burst(way, [], [], [], [], prefix, {}) for way in ("layer", "async", "auto")}
    for number in range(rounds + 1):
        for way, burst in bursts.items():
            engine.forget_gpu()
            engine.policy._path = way
            engine.take_choices()
            prompts = [each + engine.client.prompt(engine.chance, _NEW) for each in prefixes]
            began = time.perf_counter()
            waiting = {engine.add(prompt, 1) for prompt in prompts}
            times, cached = list[float](), prefix
            while waiting:
                for output in engine.step():
                    times.append((time.perf_counter() - began) * 1e3)
                    cached = min(cached, output.num_cached_tokens or 0)
                    waiting.discard(output.request_id)
            if number:  # the first round compiles kernels, so it does not count
                for figures, value in ((burst.first, times[0]), (burst.last, times[-1])):
                    figures.append(value)
                burst.mean.append(statistics.mean(times))
                burst.host.append(host_ms())
                least = min(burst.cached, cached)
                bursts[way] = replace(burst, cached=least, chosen=engine.take_choices())
    return Bursts(list(bursts.values()))


def measure_beside(
    setup: Setup, running: int, hits: int, prefix: int, rounds: int, budgets: Sequence[float], vocabulary: int
) -> Runners:
    engine = _Engine(setup, vocabulary)
    prefixes = engine.prefixes(_PREFIXES, prefix)
    ways = {"async": 0.0} | {f"auto, {budget:g} ms": budget / 1e3 for budget in budgets}
    found = {way: Beside(way, [], [], [], prefix, {}) for way in ways}
    names = [engine.add(engine.client.prompt(engine.chance, _SHORT), _LONG) for _ in range(running)]
    for _ in range(_EVERY):
        engine.step()
    turn = _turns(prefixes)
    for number in range(rounds + 1):
        for way, budget in ways.items():
            engine.policy._path, engine.policy._budget = way.split(",")[0], budget
            engine.take_choices()
            one = found[way]
            for _ in range(hits):
                gaps, seconds, cached = _one_hit(engine, next(turn), set(names))
                if number:
                    one.gaps.extend(gaps)
                    one.hits.append(seconds)
                    one.host.append(host_ms())
                    found[way] = one = Beside(way, one.gaps, one.hits, one.host, min(one.cached, cached), one.chosen)
            if number:
                chosen = dict(one.chosen)
                for label, count in engine.take_choices().items():
                    chosen[label] = chosen.get(label, 0) + count
                found[way] = Beside(way, one.gaps, one.hits, one.host, one.cached, chosen)
    engine.abort(names)
    return Runners(list(found.values()))


def _turns(prefixes: Sequence[list[int]]) -> Iterator[list[int]]:
    """Yield the prefixes in turn. When one comes again, the GPU has evicted it."""
    while True:
        yield from prefixes


def _one_hit(engine: _Engine, prefix: list[int], running: set[str]) -> tuple[list[float], float, int]:
    """Return the times between two tokens of the running requests, the time to the hit's first token, both in ms, and
    how many tokens of the hit were cached."""
    for _ in range(_EVERY // 3):
        engine.step()
    last = began = time.perf_counter()
    name = engine.add(prefix + engine.client.prompt(engine.chance, _NEW), 1)
    gaps, seconds, cached = list[float](), 0.0, 0
    for _ in range(_EVERY):
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id == name:
                seconds, cached = (now - began) * 1e3, output.num_cached_tokens or 0
        if any(output.request_id in running for output in outputs):
            gaps.append((now - last) * 1e3)
            last = now
    while not seconds:
        for output in engine.step():
            if output.request_id == name:
                seconds, cached = (time.perf_counter() - began) * 1e3, output.num_cached_tokens or 0
    return gaps, seconds, cached


def _range(figures: Sequence[float]) -> str:
    return f"{statistics.median(figures):.1f} ({min(figures):.1f} to {max(figures):.1f})"


def _at(figures: Sequence[float], share: float) -> float:
    ordered = sorted(figures)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bursts_table(title: str, bursts: Sequence[Burst]) -> Table:
    head = ["loads", "first token of the first, ms", "mean, ms", "of the last, ms", "loop of the host, ms"]
    rows = [
        [one.way, _range(one.first), _range(one.mean), _range(one.last), f"{statistics.median(one.host):.1f}"]
        for one in bursts
    ]
    return Table(title, head, rows)


def beside_table(title: str, found: Sequence[Beside]) -> Table:
    head = ["loads", "between tokens: p50, ms", "p99", "most", "first token of a hit, ms", "loop of the host, ms"]
    rows = [
        [
            one.way,
            f"{_at(one.gaps, 0.5):.1f}",
            f"{_at(one.gaps, 0.99):.1f}",
            f"{max(one.gaps):.1f}",
            _range(one.hits),
            f"{statistics.median(one.host):.1f}",
        ]
        for one in found
    ]
    return Table(title, head, rows)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    results, shape = open_results("crowd", options), shape_of(options)
    prefix, hits, rounds = (640, 4, 1) if options.tiny else (options.prefix, options.hits, options.rounds)
    longest = max(prefix + 64, _SHORT + _LONG)
    config = {"max_position_embeddings": max(65536, longest)}
    with plain_setup(options, config=config, max_tokens=longest) as plain:

        def with_gpu(tokens: int) -> Setup:
            return replace(plain, connector="kvstow", gpu_blocks=tokens // block_tokens() + 256)

        about = f"{options.shape}, prefixes of {prefix} tokens, {options.attention}, graphs: {options.graphs}"
        names = {"shape": options.shape, "graphs": options.graphs, "attention": options.attention}
        if "burst" in options.parts:
            bursts = results.attempt(
                "burst",
                lambda: run(
                    _TIMEOUT,
                    measure_bursts,
                    with_gpu((hits + 1) * (prefix + 64)),
                    hits,
                    prefix,
                    rounds,
                    shape.vocabulary,
                ),
                **names,
            )
            if bursts is not None:
                results.show(bursts_table(f"{hits} hits at once: {about}", bursts.rows))
        if "beside" in options.parts:
            running = 2 if options.tiny else options.running
            tokens = _ON_GPU * prefix + running * (_SHORT + _LONG)
            found = results.attempt(
                "beside",
                lambda: run(
                    _TIMEOUT,
                    measure_beside,
                    *(with_gpu(tokens), running, max(1, hits // 4), prefix, rounds, options.budgets, shape.vocabulary),
                ),
                **names,
            )
            if found is not None:
                results.show(beside_table(f"{running} requests decode: {about}", found.rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("crowd", __doc__, shape=True)
    parser.add_argument("--parts", nargs="+", default=["burst", "beside"], choices=["burst", "beside"])
    parser.add_argument("--prefix", type=int, default=16000, help="tokens; default: %(default)s")
    parser.add_argument("--hits", type=int, default=16, help="at once; beside requests that decode a quarter of it")
    parser.add_argument("--running", type=int, default=16, help="requests that decode")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.0, 10.0, 50.0], help="ms")
    parser.add_argument("--attention", default=ATTENTION, help="vLLM's attention backend; default: %(default)s")
    parser.add_argument("--pool", type=float, default=40.0, metavar="GIB", help="host memory")
    add_engine(parser, graphs="none")
    return parser
