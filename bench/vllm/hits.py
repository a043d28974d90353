"""Time to first token of hits whose prefix is only in host memory: one hit, 16 hits at once, and 16 requests with one
such prefix at once. Also the time to start.

    python3 -m bench.vllm hits [--shapes 8b tp8] [--connectors ...] [--tokens 16007] [--graphs full] [--pool 40]
        [--attention FLASH_ATTN] [--out DIR]

There are 16 sessions with prompts of 16,007 tokens over a GPU cache that holds 4. Weights are random, because times are
measured, and not answers, but answers after a hit are compared with the first ones. A prompt is seldom a multiple of a
block. Of a prompt that is one, such as 16,000 tokens, a hit computes a single token, like a decode step. Of any other
prompt it computes the rest of the last block. The floor of a hit is the time with the prefix on the GPU plus the bytes
over the link. A hit of KVStow is divided at events that its connector sees (`bench.vllm.hitsplit`). The same few
milliseconds of Python are timed after each hit, because eager steps are as fast as their host, and a shared machine
changes its speed. Writes `hits.jsonl` and `hits.md`.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from vllm import LLM, SamplingParams

from bench.report import Table, verdict
from bench.vllm import admin
from bench.vllm.captures import Captures, observe_captures
from bench.vllm.engines import ATTENTION, GIB, Setup, block_tokens, start_llm, wait_until_usable
from bench.vllm.hitsplit import HitLog, Split, observe_hits
from bench.vllm.model import SHAPES
from bench.vllm.process import run
from bench.vllm.registration import observe_registration
from bench.vllm.results import add_engines, make_parser, open_results, plain_setup

BAR = 1.10  # times the floor
START_BAR = 0.5  # seconds above the start without a connector

_TIMEOUT = 240.0
_PINNING = 90.0
_COPIES = 7
_LOOPS = 100_000  # they take about 5 ms
_FANS = 3
_BURSTS = 3  # vLLM compiles kernels in the first one, for 0.6 s


@dataclass(frozen=True, slots=True)
class Sessions:
    number: int = 16
    tokens: int = 16007
    on_gpu: int = 4
    few: int = 6  # sessions without a connector, which only gives the prefix on the GPU and the start


FULL, TINY = Sessions(), Sessions(number=4, tokens=640, on_gpu=2, few=3)


@dataclass(frozen=True, slots=True)
class Link:
    """The rate of one large copy to the device, in GB/s, as a median."""

    gb_per_second: float


@dataclass(frozen=True, slots=True)
class Hits:
    """Times in milliseconds until one token has arrived, or eight ("8"), as medians over the sessions.

    `cold8`: nothing is cached. `hit`: the prefix is only in host memory. `on_gpu`: it is on the GPU. `burst`: all
    sessions at once, the median of three. `fan`: as many requests of one prompt at once, the median of three prompts.
    `cached` is the smallest number of tokens that a hit found. `same` counts sessions whose eight tokens did not
    change. `registration_seconds` is the part of the start in which vLLM waited for the connector. `pinned_seconds` is
    how long after the start KVStow's pool was pinned; no request is sent before. `bursts` and `fans` are the three of
    each. `split` divides hits of KVStow. `each` are all hits, in turn. `host` are the times of the same loop of Python
    after each hit.
    """

    start_seconds: float
    registration_seconds: float
    cold8: float
    on_gpu: float
    hit: float | None = None
    hit_least: float | None = None
    hit8: float | None = None
    burst: float | None = None
    bursts: list[float] | None = None
    fan: float | None = None
    fans: list[float] | None = None
    each: list[float] | None = None
    host: list[float] | None = None
    split: Split | None = None
    cached: int | None = None
    same: int | None = None
    sessions: int = 0
    pinned_seconds: float | None = None
    captures: Captures | None = None
    admin: admin.Summary | None = None


def measure_link(num_bytes: int = GIB) -> Link:
    import torch

    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).fill_(1)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(_COPIES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return Link(num_bytes / statistics.median(seconds[1:]) / 1e9)


def measure(setup: Setup, sessions: Sessions, vocabulary: int) -> Hits:
    """Measure in one process with the engine, whose clock then depends on nothing else."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with ExitStack() as stack:
        waited = stack.enter_context(observe_registration())
        observed = stack.enter_context(observe_captures()) if setup.graphs != "none" else None
        started = start_llm(setup)
        captures, registration = observed() if observed else None, waited()
    pinned = wait_until_usable(started, setup, _PINNING)
    client, chance = Client(started.engine, vocabulary), random.Random(0)
    number = sessions.few if setup.connector == "none" else sessions.number
    prompts = [client.prompt(chance, sessions.tokens) for _ in range(number)]
    client.ask([5] * 64)
    client.ask([7] * sessions.tokens)
    cold = [client.ask(prompt, 8) for prompt in prompts]
    cold8 = _ms(answer.seconds for answer in cold)
    if setup.connector == "none":
        on_gpu = client.ms_on_gpu(prompts)
        return Hits(started.seconds, registration, cold8, on_gpu, sessions=number, captures=captures)
    client.drain(chance)
    hits, host = list[_Answer](), list[float]()
    with observe_hits() as log:
        for prompt in prompts:
            hits.append(client.ask(prompt, log=log))
            host.append(host_ms())
    again = [client.ask(prompt, 8) for prompt in prompts]
    on_gpu = client.ms_on_gpu(prompts[: sessions.few])
    bursts = [client.ms_of_all(prompts) for _ in range(_BURSTS)]
    fans = [client.ms_of_all([prompt] * number) for prompt in prompts[:_FANS]]  # the GPU has only the last prompts
    return Hits(
        started.seconds,
        registration,
        cold8,
        on_gpu,
        hit=_ms(answer.seconds for answer in hits),
        hit_least=min(answer.seconds for answer in hits) * 1e3,
        hit8=_ms(answer.seconds for answer in again),
        burst=statistics.median(bursts),
        bursts=bursts,
        fan=statistics.median(fans),
        fans=fans,
        each=[answer.seconds * 1e3 for answer in hits],
        host=host,
        split=log.split(),
        cached=min(answer.cached for answer in hits),
        same=sum(first.tokens == second.tokens for first, second in zip(cold, again, strict=True)),
        sessions=number,
        pinned_seconds=pinned,
        captures=captures,
        admin=admin.summarize(started.port) if started.port else None,
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    seconds: float
    tokens: tuple[int, ...]
    cached: int


class Client:
    def __init__(self, llm: LLM, vocabulary: int) -> None:
        self._llm, self._vocabulary = llm, vocabulary
        self._params = {
            number: SamplingParams(max_tokens=number, temperature=0, detokenize=False, ignore_eos=True)
            for number in (1, 8)
        }

    def prompt(self, chance: random.Random, tokens: int) -> list[int]:
        return [chance.randrange(10, self._vocabulary) for _ in range(tokens)]

    def ask(self, prompt: list[int], tokens: int = 1, log: HitLog | None = None) -> _Answer:
        if log is not None:
            log.begin()
        began = time.perf_counter()
        (output,) = self._generate([prompt], tokens)
        seconds = time.perf_counter() - began
        if log is not None:
            log.end()
        return _Answer(seconds, tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0)

    def ms_of_all(self, prompts: list[list[int]]) -> float:
        began = time.perf_counter()
        self._generate(prompts, 1)
        return (time.perf_counter() - began) * 1e3

    def ms_on_gpu(self, prompts: list[list[int]]) -> float:
        """Return the time of the second of two equal requests, which finds its whole prefix on the GPU."""
        seconds = []
        for prompt in prompts:
            self.ask(prompt)
            seconds.append(self.ask(prompt).seconds)
        return _ms(seconds)

    def drain(self, chance: random.Random) -> None:
        """Make steps in which stores of ended requests end."""
        for _ in range(6):
            self.ask(self.prompt(chance, 200))
        time.sleep(1)
        self.ask([9] * 40)

    def _generate(self, prompts: list[list[int]], tokens: int) -> list[Any]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: list[Any] = self._llm.generate(inputs, self._params[tokens], use_tqdm=False)
        return outputs


def host_ms() -> float:
    began, total = time.perf_counter(), 0
    for number in range(_LOOPS):
        total ^= number
    return (time.perf_counter() - began) * 1e3


def _ms(seconds: Iterable[float]) -> float:
    return statistics.median(seconds) * 1e3


def table(shape: str, prompt_bytes: int, link: Link | None, runs: Sequence[tuple[str, Hits]]) -> Table:
    """Make the table. The floor uses the time with the prefix on the GPU of the runs without a connector."""
    plain = [hits for name, hits in runs if name == "none"]
    on_gpu = statistics.median(hits.on_gpu for hits in plain) if plain else None
    start = min(hits.start_seconds for hits in plain) if plain else None  # the first may compile kernels
    title, floor = f"{shape}: {prompt_bytes / GIB:.2f} GiB a prompt", None
    if link is not None and on_gpu is not None:
        on_link = prompt_bytes / link.gb_per_second / 1e6
        floor = on_gpu + on_link
        title += f", {on_link:.1f} ms on the link, floor {floor:.1f} ms"
    head = ["connector", "start", f"bar +{START_BAR} s", "on the GPU, ms", "hit, ms", f"of the floor, bar {BAR:.2f}"]
    rows = [[name, *_cells(hits, start, floor, judged=name in ("kvstow", "attached"))] for name, hits in runs]
    head += ["least, ms", "all at once, ms", "one prompt at once, ms"]
    head += ["same answers", "beside copy and compute, ms", "loop of the host, ms"]
    return Table(title, head, rows)


def _cells(hits: Hits, start: float | None, floor: float | None, *, judged: bool) -> list[str]:
    later, share = "", ""
    if start is not None:
        later = f"{hits.start_seconds - start:+.2f} s"
        later += f", {verdict(hits.start_seconds - start <= START_BAR)}" if judged else ""
    if floor is not None and hits.hit is not None:
        share = f"{hits.hit / floor:.3f}"
        share += f", {verdict(hits.hit <= BAR * floor)}" if judged else ""
    first = [f"{hits.start_seconds:.2f} s", later, f"{hits.on_gpu:.1f}"]
    if hits.hit is None or hits.hit_least is None or hits.burst is None or hits.fan is None or hits.host is None:
        return [*first, *[""] * 8]
    same = f"{hits.same}/{hits.sessions}"
    beside = "" if hits.split is None else f"{hits.split.beside:.2f}"
    host = f"{statistics.median(hits.host):.2f}"
    times = [f"{hits.hit:.1f}", share, f"{hits.hit_least:.1f}", f"{hits.burst:.0f}", f"{hits.fan:.0f}"]
    return [*first, *times, same, beside, host]


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    results = open_results("hits", options)
    link = None if options.tiny else results.attempt("link", lambda: run(60, measure_link))
    sessions = TINY if options.tiny else replace(FULL, tokens=options.tokens)
    gpu_blocks = sessions.on_gpu * sessions.tokens // block_tokens() + sessions.tokens * 6 // 1000
    for shape in ["tiny"] if options.tiny else options.shapes:
        with plain_setup(options, shape=shape, max_tokens=sessions.tokens * 2, gpu_blocks=gpu_blocks) as plain:
            arguments = sessions, SHAPES[shape].vocabulary
            runs = results.attempt_each("hits", options, _TIMEOUT, measure, plain, *arguments, shape=shape)
        results.show(table(shape, sessions.tokens * SHAPES[shape].token_bytes(), link, runs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("hits", __doc__)
    shapes = [name for name in SHAPES if name != "tiny"]
    parser.add_argument("--shapes", nargs="+", default=["8b", "tp8"], choices=shapes)
    parser.add_argument("--tokens", type=int, default=FULL.tokens, help="of each prompt; default: %(default)s")
    parser.add_argument("--attention", default=ATTENTION, help="vLLM's attention backend; default: %(default)s")
    add_engines(parser, ["none", "kvstow", "simple", "offloading", "none"], pool=40.0, graphs="none")
    return parser
