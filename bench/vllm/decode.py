"""What pinning costs the requests that are served meanwhile: time between tokens, and time to the first one.

    python3 -m bench.vllm decode [--connectors none kvstow simple none] [--pool 64] [--windows 4] [--out DIR]

16 requests are decoded as soon as the engine is up. Each gap between two outputs of one of them is a step. KVStow pins
and stores meanwhile, while others pin before their engine is up. Writes `decode.jsonl` and `decode.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from bench.report import Table
from bench.vllm.admin import PinWatch
from bench.vllm.engines import Setup, start_async
from bench.vllm.results import add_engines, make_parser, open_results, plain_setup, shape_of

_TIMEOUT = 240.0


@dataclass(frozen=True, slots=True)
class Batch:
    """`windows` of this many steps each. Steps grow longer as more is decoded, so windows of the same number are
    compared. `most` is a limit in seconds, for slow steps."""

    requests: int = 16
    prompt_tokens: int = 512
    max_tokens: int = 32768
    windows: int = 4
    steps: int = 1000
    most: float = 60.0


FULL, TINY = Batch(), Batch(requests=2, prompt_tokens=64, windows=2, steps=100, most=20.0)


@dataclass(frozen=True, slots=True)
class Window:
    """Milliseconds between two outputs of a request, over some steps. `pinning` is the share of them that began before
    the pool was pinned."""

    p50: float
    p99: float
    p999: float
    longest: float
    pinning: float


@dataclass(frozen=True, slots=True)
class Decoded:
    """`start_seconds` is how long it took until the engine was up, and `first_token_seconds` how long from the same
    moment until all requests had a token.

    `pinned_seconds` is how long from then until the pool was seen pinned. It is None without a pool, or if the pool was
    not pinned. `merged` counts outputs of several tokens, which the client was too slow to see separately.
    """

    start_seconds: float
    first_token_seconds: float
    pinned_seconds: float | None
    windows: list[Window]
    merged: int


def measure(setup: Setup, batch: Batch, vocabulary: int) -> Decoded:
    return asyncio.run(_measure(setup, batch, vocabulary))


async def _measure(setup: Setup, batch: Batch, vocabulary: int) -> Decoded:
    began = time.perf_counter()
    started = start_async(setup)
    with ExitStack() as stack:
        watch = stack.enter_context(PinWatch(started.port)) if started.port else None
        async with AsyncExitStack() as requests:
            seen = [_Request(started.engine, setup, batch, vocabulary, number) for number in range(batch.requests)]
            for request in seen:
                requests.push_async_callback(request.stop)
            while not all(request.moments for request in seen):
                seen[0].check()
                await asyncio.sleep(0.001)
            up = time.perf_counter()
            while len(seen[0].moments) <= batch.windows * batch.steps and time.perf_counter() < up + batch.most:
                await asyncio.sleep(0.1)
                seen[0].check()
    moments, tokens = np.array(seen[0].moments), np.array(seen[0].tokens)
    started.engine.shutdown()
    pinned = watch.pinned_at if watch else None
    until = -np.inf if watch is None else np.inf if pinned is None else pinned
    gaps, pinning = np.diff(moments) * 1e3, moments[:-1] < until
    parts = [slice(first, first + batch.steps) for first in range(0, batch.windows * batch.steps, batch.steps)]
    return Decoded(
        start_seconds=started.seconds,
        first_token_seconds=up - began,
        pinned_seconds=None if pinned is None else pinned - up,
        windows=[_window(gaps[part], pinning[part]) for part in parts if len(gaps[part])],
        merged=int((tokens > 1).sum()),
    )


class _Request:
    """A request that is decoded until it is stopped, with the times and sizes of its outputs as the client sees
    them."""

    def __init__(self, engine: Any, setup: Setup, batch: Batch, vocabulary: int, number: int) -> None:
        chance = random.Random(number)
        self.moments: list[float] = []
        self.tokens: list[int] = []
        prompt = [chance.randrange(10, vocabulary) for _ in range(batch.prompt_tokens)]
        params = SamplingParams(
            max_tokens=batch.max_tokens - batch.prompt_tokens,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        self._task = asyncio.create_task(
            self._follow(engine.generate({"prompt_token_ids": prompt}, params, str(number)))
        )

    async def _follow(self, stream: Any) -> None:
        async for output in stream:
            self.moments.append(time.perf_counter())
            self.tokens.append(len(output.outputs[0].token_ids))

    def check(self) -> None:
        """Raise the error that ended the request too early, if there is one."""
        if self._task.done():
            self._task.result()
            raise RuntimeError("a request ended before the measurement")

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


def _window(gaps: Any, pinning: Any) -> Window:
    p50, p99, p999 = (float(value) for value in np.percentile(gaps, [50, 99, 99.9]))
    return Window(p50, p99, p999, float(gaps.max()), float(pinning.mean()))


def table(batch: Batch, runs: Sequence[tuple[str, Decoded]]) -> Table:
    rows = []
    for name, decoded in runs:
        for number, window in enumerate(decoded.windows):
            first = (
                [name, f"{decoded.start_seconds:.2f}", f"{decoded.first_token_seconds:.2f}"] if not number else [""] * 3
            )
            figures = [f"{value:.2f}" for value in (window.p50, window.p99, window.p999, window.longest)]
            rows.append([*first, f"{number * batch.steps}", *figures, f"{window.pinning:.0%}"])
    head = ["", "start, s", "first token, s", "from step", "p50, ms", "p99, ms", "p99.9, ms", "longest, ms", "pinning"]
    return Table(f"Time between tokens, {batch.steps} steps a row", head, rows)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    results, batch = open_results("decode", options), TINY if options.tiny else replace(FULL, windows=options.windows)
    with plain_setup(
        options,
        tiny_pool=1.0,
        max_tokens=batch.max_tokens,
        batch_requests=batch.requests,
        graph_sizes=(batch.requests,),
    ) as plain:
        vocabulary = shape_of(options).vocabulary
        runs = results.attempt_each("decode", options, _TIMEOUT, measure, plain, batch, vocabulary)
    results.show(table(batch, runs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("decode", __doc__, shape=True)
    add_engines(parser, ["none", "kvstow", "simple", "none"], pool=64.0, graphs="decode")
    parser.add_argument("--windows", type=int, default=FULL.windows, help=f"of {FULL.steps} steps each")
    return parser
