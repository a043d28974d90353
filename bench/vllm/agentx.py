"""A fleet of coding agents against `vllm serve`: what they gain with KVStow, and with other connectors.

    python3 -m bench.vllm agentx [--trace FILE] [--shape 8b] [--concurrency 32] [--scale 4] [--gpu-blocks 12500]
        [--connectors none kvstow simple offloading] [--pool 80] [--warm 8] [--seconds 20] [--within 560]
        [--resume DIR] [--out DIR]
    python3 -m bench.vllm agentx --table DIR

The agents are contexts of a trace that `kvstow trace import` has made. Prompts, answers and pauses are divided by
`--scale`, so that minutes are enough, and the GPU's cache is made smaller. Each of so many agents sends the requests of
a context one after the other, over HTTP with streaming, each after the pause that precedes it in the trace, and then
takes another context. It begins the first one in the middle. No hints are given. After `--warm` seconds, the requests
that end within `--seconds` are counted.

A row is a connector and a number of agents. A server serves all numbers in turn, each with other tokens, so that
nothing is found of the one before. All four connectors with one number of agents fit into ten minutes. No row begins
that would not end `--within` so many seconds, judged by the slowest one before it. What is left is measured by the same
command with `--resume`: it does not measure the rows in the `agentx*.jsonl` of that folder again.

"GPU seconds saved, as measured" compares the requests with those of the rows without a connector. The time to compute a
prompt's tokens that were not found is read off a curve, which each server measures first with single prompts of several
lengths. "As the pool says" is what KVStow has counted in the same time. Writes `agentx.jsonl` and `agentx.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.agents import TRACE
from bench.report import Table
from bench.vllm import admin
from bench.vllm.engines import Setup, block_tokens, transfer_of
from bench.vllm.hits import host_ms
from bench.vllm.process import MeasurementError
from bench.vllm.results import (
    Nodes,
    add_engines,
    add_resuming,
    make_parser,
    name_of,
    open_results,
    plain_setup,
    read_rows,
    rows_of,
    shape_of,
)
from kvstow_service.replay.trace import BLOCK_TOKENS, TraceRequest, read_trace

_START_SECONDS, _END_SECONDS, _ANSWER_SECONDS = 300.0, 60.0, 120.0
_FEWEST_TURNS = 4
_LONGEST_PAUSE = 30.0
_CURVE = (256, 1024, 4096, 12_288, 24_576)
"""Lengths in tokens of the prompts whose first tokens give the curve of computing."""
_TINY_CURVE = (64, 256, 1024)


class Turn(NamedTuple):
    """A request of an agent. `pause` is the time before it in the trace, in seconds. `blocks` are the ids of the
    prompt's blocks, and equal ids have equal tokens. The last block is cut so that the prompt has `tokens`. `answer` is
    in tokens."""

    pause: float
    blocks: Sequence[int]
    tokens: int
    answer: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """The agents' contexts after division by `scale`."""

    contexts: list[list[Turn]]
    scale: int
    vocabulary: int

    def prompt(self, salt: str, turn: Turn) -> list[int]:
        length = BLOCK_TOKENS // self.scale
        tokens = [token for one in turn.blocks for token in _tokens_of(salt, one, length, self.vocabulary)]
        return tokens[: turn.tokens]


@cache
def _tokens_of(salt: str, block: int, length: int, vocabulary: int) -> list[int]:
    chance = random.Random(f"{salt} {block}")
    return [chance.randrange(10, vocabulary) for _ in range(length)]


def make_fleet(requests: Sequence[TraceRequest], scale: int, longest: int, vocabulary: int) -> Fleet:
    """Cut each context before its first prompt of more than `longest` tokens, and leave out those with few turns."""
    contexts: dict[str, list[Turn]] = {}
    ended, closed = dict[str, float](), set[str]()
    for request in requests:
        name, tokens = request.context, request.input_length // scale
        if name is None or name in closed or not tokens:
            continue
        if tokens > longest:
            closed.add(name)
            continue
        pause = max(0.0, request.timestamp - ended.get(name, request.timestamp)) / 1e3 / scale
        answer = max(1, request.output_length // scale)
        turn = Turn(min(pause, _LONGEST_PAUSE), request.hash_ids, tokens, answer)
        contexts.setdefault(name, []).append(turn)
        ended[name] = request.ended
    return Fleet([turns for turns in contexts.values() if len(turns) >= _FEWEST_TURNS], scale, vocabulary)


class Answer(NamedTuple):
    """`began`, `first` and `ended` are times of `time.monotonic`. `cached` are the prompt's tokens that were found."""

    began: float
    first: float
    ended: float
    prompt: int
    cached: int
    answer: int


class Server:
    """`vllm serve`, which takes and gives token ids."""

    def __init__(self, port: int) -> None:
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            timeout=_ANSWER_SECONDS,
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def ask(self, tokens: list[int], answer: int) -> Answer:
        body = {
            "token_ids": tokens,
            "sampling_params": {"max_tokens": answer, "temperature": 0, "ignore_eos": True, "detokenize": False},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first, usage = time.monotonic(), None, None
        async with self._client.stream("POST", "/inference/v1/generate", json=body) as response:
            if response.is_error:
                await response.aread()
                raise MeasurementError(f"the server answered {response.status_code}: {response.text[:500]}")
            async for line in response.aiter_lines():
                if first is None and line.startswith("data:"):
                    first = time.monotonic()
                if '"usage"' in line:
                    usage = json.loads(line.removeprefix("data:")).get("usage") or usage
        if first is None or usage is None:
            raise MeasurementError("the server's stream ended without a token or without its usage")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(began, first, time.monotonic(), usage["prompt_tokens"], cached, usage["completion_tokens"])


@dataclass(frozen=True, slots=True)
class Served:
    """Figures of the counted requests. Times to the first token are in milliseconds. `curve` is that of computing, as
    tokens and seconds. `compute_seconds` is the time for the tokens that were not found, by that curve. `pool_seconds`
    is what KVStow says that it has saved, None for other connectors. `host` are times of the loop of Python, in
    milliseconds."""

    agents: int
    seconds: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    first: list[float]
    compute_seconds: float
    pool_seconds: float | None
    curve: list[tuple[int, float]]
    host: list[float]
    start_seconds: float
    errors: list[str] = field(default_factory=list)


def seconds_of(curve: Sequence[tuple[int, float]], tokens: int) -> float:
    """Return the seconds that a prompt of `tokens` takes, between the measured lengths on a straight line. Below the
    first length, it takes as long as that one; above the last, the line goes on."""
    if tokens <= curve[0][0]:
        return curve[0][1]
    at = min(bisect_right([length for length, _ in curve], tokens), len(curve) - 1)
    (below, fast), (above, slow) = curve[at - 1], curve[at]
    return fast + (slow - fast) * (tokens - below) / (above - below)


def compute_seconds(curve: Sequence[tuple[int, float]], answer: Answer) -> float:
    """Return the seconds in which the prompt's tokens that were not found were computed. The time of a short prompt is
    that of launching the step, which a request takes in any case."""
    found = seconds_of(curve, answer.cached) if answer.cached else 0.0
    return max(curve[0][1], seconds_of(curve, answer.prompt) - found)


async def _measure_curve(server: Server, lengths: Sequence[int], vocabulary: int) -> list[tuple[int, float]]:
    chance, curve = random.Random("curve"), list[tuple[int, float]]()
    for length in lengths:
        seconds = []
        for _ in range(3):
            answer = await server.ask([chance.randrange(10, vocabulary) for _ in range(length)], 1)
            seconds.append(answer.first - answer.began)
        curve.append((length, min(seconds)))
    return curve


def turns_of(number: int, agents: int, contexts: Sequence[list[Turn]]) -> Iterator[tuple[int, Turn]]:
    """The turns of agent `number` of so many, without an end. Each comes with the number of times that the agents have
    been through all contexts, because a context that is repeated has other tokens. The agent begins its first context
    in the middle, at once."""
    skipped = random.Random(f"agent {number}").random()
    first = contexts[number % len(contexts)]
    begun = int(skipped * (len(first) - 1))
    yield number // len(contexts), first[begun]._replace(pause=0.0)
    for turn in first[begun + 1 :]:
        yield number // len(contexts), turn
    for at in count(number + agents, agents):
        lap, place = divmod(at, len(contexts))
        for turn in contexts[place]:
            yield lap, turn


async def _run_agents(
    server: Server, fleet: Fleet, agents: int, warm: float, seconds: float, pool_port: int | None
) -> tuple[list[Answer], float | None, list[str]]:
    """Return the counted answers, what the pool says, and errors."""
    begins = time.monotonic() + warm
    ends = begins + seconds
    salt, answers, errors = f"{agents} agents", list[Answer](), list[str]()
    contexts = random.Random("order").sample(fleet.contexts, len(fleet.contexts))

    async def agent(number: int) -> None:
        for lap, turn in turns_of(number, agents, contexts):
            await asyncio.sleep(turn.pause)
            try:
                answers.append(await server.ask(fleet.prompt(f"{salt} {lap}", turn), turn.answer))
            except (httpx.HTTPError, MeasurementError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                return

    async def saved_meanwhile() -> float | None:
        if pool_port is None:
            return None
        await asyncio.sleep(max(0.0, begins - time.monotonic()))
        before = await asyncio.to_thread(_pool_seconds, pool_port)
        await asyncio.sleep(max(0.0, ends - time.monotonic()))
        return await asyncio.to_thread(_pool_seconds, pool_port) - before

    tasks = [asyncio.create_task(agent(number)) for number in range(agents)]
    watch = asyncio.create_task(saved_meanwhile())
    await asyncio.wait(tasks, timeout=warm + seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [one for one in answers if begins <= one.ended < ends], await watch, errors


def _pool_seconds(port: int) -> float:
    """Return the seconds of computing that the pool has saved, after those in which requests have waited for loads."""
    prefill = admin.ask(port, "/v1/stats")["prefill"]
    return float(prefill["hit_seconds"] - prefill["load_wait_seconds"])


@contextmanager
def _serving(setup: Setup, log: Path) -> Iterator[tuple[int, int | None, float]]:
    """Start a server. Yields its port, that of KVStow's admin server, and the seconds of its start."""
    port, transfer = admin.free_port(), transfer_of(setup)
    cuda = ["--dtype", "bfloat16"] if block_tokens() == 16 else ["--dtype", "float32"]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(setup.model), "--tokens-only"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", *cuda]
    command += ["--block-size", str(block_tokens()), "--max-model-len", str(setup.max_tokens)]
    command += ["--num-gpu-blocks-override", str(setup.gpu_blocks), "--max-num-seqs", str(setup.batch_requests)]
    command += ["--gpu-memory-utilization", str(setup.gpu_share), "--enable-prompt-tokens-details"]
    command += ["--disable-uvicorn-access-log"]
    if setup.graphs == "none":
        command += ["--enforce-eager"]
    pool_port = None
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
        pool_port = (
            setup.node.port if setup.node is not None else transfer["kv_connector_extra_config"].get("admin_port")
        )
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        while not _is_healthy(port):
            if process.poll() is not None or time.monotonic() - began > _START_SECONDS:
                raise MeasurementError(f"vllm serve did not start: {log.read_text()[-2500:]}")
            time.sleep(0.2)
        seconds = time.monotonic() - began
        if pool_port is not None and setup.node is None:
            admin.wait_until_pinned(pool_port, _START_SECONDS)
        yield port, pool_port, seconds
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_healthy(port: int) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success
    return False


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Make a table for each number of agents."""
    made = []
    for agents in sorted({row["agents"] for row in rows}):
        these = [row for row in rows if row["agents"] == agents]
        plain = next((row for row in these if row["connector"] == "none"), None)
        made.append(Table(f"{agents} agents at a time", _HEAD, [_line(row, plain) for row in these]))
    return made


_HEAD = [
    "connector",
    "requests/s",
    "answer tokens/s",
    "first token p50, ms",
    "p90",
    "p99",
    "prompt tokens computed",
    "GPU seconds saved a second, as measured",
    "as the pool says",
    "loop of the host, ms",
]


def _line(row: Mapping[str, Any], plain: Mapping[str, Any] | None) -> list[str]:
    cut = statistics.quantiles(row["first"], n=100, method="inclusive") if len(row["first"]) > 1 else [0.0] * 99
    computed = row["prompt_tokens"] - row["cached_tokens"]
    saved = ""
    if plain is not None and plain is not row and plain["requests"] and row["requests"]:
        each = plain["compute_seconds"] / plain["requests"] - row["compute_seconds"] / row["requests"]
        saved = f"{each * row['requests'] / row['seconds']:.2f}"
    pool = "" if row["pool_seconds"] is None else f"{row['pool_seconds'] / row['seconds']:.2f}"
    return [
        row["connector"],
        f"{row['requests'] / row['seconds']:.2f}",
        f"{row['answer_tokens'] / row['seconds']:.0f}",
        *(f"{cut[at]:.0f}" for at in (49, 89, 98)),
        f"{computed / max(1, row['prompt_tokens']):.1%}",
        saved,
        pool,
        f"{statistics.median(row['host']):.1f}",
    ]


class Lease:
    """The time in which rows are measured."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends = clock() + seconds
        self._began = clock()
        self._longest: dict[bool, float] = {}
        """How long the slowest row has taken, with and without the start of its server."""

    def begin(self, *, starts: bool) -> bool:
        """Begin a row, with or without the start of a server. Returns False if it would not end in time, as far as the
        rows before it tell."""
        self._began = self._clock()
        return self._began + self._longest.get(starts, 0.0) <= self._ends

    def end(self, *, starts: bool) -> None:
        self._longest[starts] = max(self._longest.get(starts, 0.0), self._clock() - self._began)


def _measure(
    setup: Setup, fleet: Fleet, options: argparse.Namespace, agents: Sequence[int], log: Path, lease: Lease
) -> Iterator[Served]:
    """Serve as many of these numbers of agents as the lease has time for. It has begun with the first one."""
    with _serving(setup, log) as (port, pool_port, start):

        async def all_of(number: int, curve: list[tuple[int, float]]) -> Served:
            async with Server(port) as server:
                host = [host_ms()]
                curve = curve or await _measure_curve(server, _TINY_CURVE if options.tiny else _CURVE, fleet.vocabulary)
                answers, pool, errors = await _run_agents(
                    server, fleet, number, options.warm, options.seconds, pool_port
                )
                host.append(host_ms())
            return Served(
                number,
                options.seconds,
                len(answers),
                sum(one.prompt for one in answers),
                sum(one.cached for one in answers),
                sum(one.answer for one in answers),
                [(one.first - one.began) * 1e3 for one in answers],
                sum(compute_seconds(curve, one) for one in answers),
                pool,
                curve,
                host,
                start,
                errors[:5],
            )

        curve: list[tuple[int, float]] = []
        for number in agents:
            if curve and not lease.begin(starts=False):
                return
            served = asyncio.run(all_of(number, curve))
            lease.end(starts=not curve)
            curve = served.curve
            _tokens_of.cache_clear()
            yield served


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.table is not None:
        for table in tables(read_rows("agentx", options.table)):
            print(f"{table.to_markdown()}\n")
        return 0
    before = read_rows("agentx", options.resume)
    known = {(row["connector"], row["agents"]) for row in before}
    results, lease = open_results("agentx", options), Lease(options.within)
    shape = shape_of(options)
    most = 2048 if options.tiny else options.longest
    fleet = make_fleet(read_trace(str(options.trace)), options.scale, most, shape.vocabulary)
    given = {"max_tokens": most + 2048, "gpu_blocks": options.gpu_blocks, "gpu_share": 0.1 if options.tiny else 0.85}
    with ExitStack() as stack:
        plain = stack.enter_context(plain_setup(options, batch_requests=64, **given))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = Nodes(stack, plain.pool_bytes)
        for connector in options.connectors:
            name = name_of(connector)
            agents = [number for number in options.concurrency if (name, number) not in known]
            try:
                if agents and lease.begin(starts=True):
                    setup = replace(plain, connector=connector, node=nodes.of(connector))
                    for served in _measure(setup, fleet, options, tuple(agents), folder / "log", lease):
                        results.add("agentx", connector=name, **asdict(served))
                        agents.remove(served.agents)
            except (MeasurementError, TimeoutError, OSError) as error:
                results.add("failed", connector=name, error=str(error)[-2500:])
            if agents:
                results.add("left", connector=name, agents=agents)
    for table in tables([*before, *rows_of("agentx", results.path)]):
        results.show(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("agentx", __doc__, shape=True)
    parser.add_argument("--trace", type=Path, default=TRACE, help="default: the trace of `bench agents`")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32], metavar="AGENTS")
    parser.add_argument("--scale", type=int, default=4, help="divides tokens and pauses; default: %(default)s")
    parser.add_argument("--longest", type=int, default=60_000, help="tokens of a prompt; default: %(default)s")
    parser.add_argument("--gpu-blocks", type=int, default=12_500, help="the GPU's cache; default: %(default)s")
    parser.add_argument("--warm", type=float, default=8.0, help="seconds that are not counted; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=20.0, help="that are counted; default: %(default)s")
    parser.add_argument("--within", type=float, default=560.0, help="seconds for all rows; default: %(default)s")
    add_resuming(parser, "agentx")
    add_engines(parser, ["none", "kvstow", "simple", "offloading"], pool=80.0, graphs="full")
    return parser
