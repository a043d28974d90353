"""Agents that pause and come back, with hints and without.

    python3 -m bench.vllm agents [--shape 8b] [--agents 64] [--turns 12] [--gap 8] [--system 512]
        [--first 1500] [--grows 400] [--seconds 150] [--rounds 1] [--modes off exact] [--one-shot 0.5]
        [--graphs none] [--attention FLASH_ATTN] [--out DIR]

Each agent has a conversation that grows turn by turn. Between two turns it pauses for a time with a heavy tail, and
after its last turn it begins another conversation. There are also prompts that never repeat. The pool has room for half
of the conversations, and the GPU for an eighth. Modes: "off" is without hints, and "lru" too, but with the policy
`lru`. With "names", hints name only the context. With "exact", they also say when the next turn comes, and release the
context after the last one. "rough" is the same with a log-error of sigma 1. Each mode has its own engine, and the
engines take turns. A round has the same agents in all modes, and their answers are compared with those of the first
mode. The weights tell answers apart: an answer is part of the next prompt, and depends on all of its KV cache.

After a quarter of the time, turns that are not the first of a conversation are counted: the share that had to compute
more than half of its prefix again, the share of prefix tokens that were found, the time to the first token, and the
seconds of the engine's steps. A second table divides the time to the first token, for turns that computed their prefix,
found it on the GPU, or loaded it: until the engine first looked the prefix up, from there to the end of the load, from
there to the start of the step that computed the first token, and that step. Writes `agents.jsonl` and `agents.md`.

With --tiny there are ten agents, and time is virtual: it passes when nothing runs. So what is found depends on the
machine as little as possible, and times have no meaning.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

from vllm import SamplingParams

from bench.report import Table
from bench.vllm.engines import ATTENTION, Setup, block_tokens, start_llm, wait_until_usable
from bench.vllm.model import SHAPES, Shape, fill_weights, write_model
from bench.vllm.process import run
from bench.vllm.results import Results, add_engine, make_parser, open_results

_PINNING, _PATIENCE = 90.0, 300.0
_STEP_SECONDS = 0.02  # the length of a step in virtual time
MODES = ("lru", "off", "names", "exact", "rough")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sizes are in tokens, times in seconds. `turns` and `gap` are medians. For each turn there are `one_shot` prompts
    that never repeat, of `one_shot_tokens`."""

    agents: int = 64
    turns: int = 12
    gap: float = 8.0
    spread: float = 1.5
    longest_gap: float = 120.0
    system: int = 512
    first: int = 1500
    grows: int = 400
    answer: int = 8
    one_shot: float = 0.5
    one_shot_tokens: int = 3000
    seconds: float = 150.0
    seed: int = 0

    @property
    def longest(self) -> int:
        """The limit for a conversation, in tokens. It ends with the turn that exceeds it."""
        return self.system + self.first + 2 * self.turns * self.grows

    @property
    def max_tokens(self) -> int:
        return max(self.longest + 2 * self.grows + self.answer, self.one_shot_tokens) + self.answer + 1

    def working_set(self) -> int:
        """The tokens of all conversations at one time, for an average turn of each agent."""
        agents = [_Agent(self, number, 1000) for number in range(self.agents)]
        sizes = [
            len(agent.prompt()) for agent in agents for _ in range(2 * self.turns) if agent.answered([0] * self.answer)
        ]
        return int(statistics.mean(sizes)) * self.agents


class _Agent:
    """An agent. It has its own random numbers, so that they do not depend on other agents."""

    def __init__(self, traffic: Traffic, number: int, vocabulary: int) -> None:
        self._traffic, self._number, self._vocabulary = traffic, number, vocabulary
        self._chance = random.Random(f"{traffic.seed} {number}")
        self._system = [random.Random(traffic.seed).randrange(10, vocabulary) for _ in range(traffic.system)]
        self._conversations = count()
        self._begin()
        for _ in range(self._chance.randrange(self._turns)):  # begin in the middle of a conversation
            if not self.is_last:
                self.answered(self._tokens(traffic.answer))
        self.known = 0

    def _begin(self) -> None:
        traffic, chance = self._traffic, self._chance
        self.name = f"agent {self._number}, conversation {next(self._conversations)}"
        self.turn = 0
        self._turns = max(3, round(chance.lognormvariate(log(traffic.turns), 0.5)))
        self.known = 0
        """The tokens of the last turn, which may be cached."""
        self._history = self._system + self._tokens(traffic.first)
        self._draw()

    def _draw(self) -> None:
        self.gap = min(
            self._chance.lognormvariate(log(self._traffic.gap), self._traffic.spread), self._traffic.longest_gap
        )
        self._error = self._chance.gauss(0.0, 1.0)

    @property
    def is_last(self) -> bool:
        return self.turn == self._turns - 1 or len(self._history) > self._traffic.longest

    def prompt(self) -> list[int]:
        return self._history

    def hints(self, mode: str) -> dict[str, Any] | None:
        if mode in ("lru", "off"):
            return None
        if mode == "names":
            return {"context": self.name}
        if self.is_last:
            return {"context": self.name, "release": True}
        return {"context": self.name, "resume_in": self.gap * (exp(self._error) if mode == "rough" else 1.0)}

    def answered(self, tokens: Sequence[int]) -> float:
        """End the turn. Returns the pause before the next one."""
        gap = self.gap
        if self.is_last:
            self._begin()
            return gap
        self.known = len(self._history) + len(tokens)
        self._history = [*self._history, *tokens, *self._tokens(self._chance.randint(1, 2 * self._traffic.grows))]
        self.turn += 1
        self._draw()
        return gap

    def _tokens(self, number: int) -> list[int]:
        return [self._chance.randrange(10, self._vocabulary) for _ in range(number)]


class _Clock:
    """Real time. For `drain`, see `_VirtualClock`."""

    def __call__(self) -> float:
        return time.monotonic()

    def stepped(self) -> None:
        """Note that the engine has made a step."""

    def wait_until(self, at: float) -> None:
        time.sleep(max(0.0, min(at - time.monotonic(), 0.01)))


class _VirtualClock(_Clock):
    """Virtual time, in which each step takes the same time, and waiting takes none."""

    def __init__(self) -> None:
        self._now = time.monotonic()

    def __call__(self) -> float:
        return self._now

    def stepped(self) -> None:
        self._now += _STEP_SECONDS

    def wait_until(self, at: float) -> None:
        self._now = max(self._now, at)


KINDS = ("computed", "found on the GPU", "loaded")


class Turn(NamedTuple):
    """A turn: the tokens of its prefix, how many were found, and how many were loaded. Seconds until the first lookup,
    from there to the end of the load, from there to the start of the step with the first token, and of that step."""

    known: int
    cached: int
    loaded: int
    parts: tuple[float, float, float, float]

    @property
    def kind(self) -> str:
        if 2 * self.cached < self.known:
            return KINDS[0]
        return KINDS[2] if self.loaded else KINDS[1]


@dataclass(frozen=True, slots=True)
class Found:
    """Figures of the turns that came back. `recomputed` is the share that computed more than half of its prefix.
    `found` is the share of prefix tokens that were not computed. Times are in ms, and `busy` is in seconds. `split`
    has, by kind, the number of turns and the medians of their parts. `answers` has a checksum of the answer to each
    prompt of an agent, by the checksum of the prompt."""

    mode: str
    seed: int
    turns: int
    recomputed: float
    found: float
    ttft: list[float] = field(repr=False)
    split: Mapping[str, tuple[int, list[float]]]
    busy: float
    asked: int
    one_shots: int
    answers: Mapping[int, int] = field(repr=False)

    @property
    def label(self) -> str:
        return f"{self.mode}, round {self.seed + 1}"


@dataclass(slots=True)
class _Asked:
    agent: _Agent | None
    at: float
    known: int
    prompt: int = 0
    looked_up: float = 0.0
    loaded_at: float = 0.0
    loaded: int = 0
    parts: tuple[float, float, float, float] | None = None
    cached: int = 0
    tokens: list[int] = field(default_factory=list)


class _Run:
    """One engine in this process, and its requests."""

    def __init__(self, setup: Setup, traffic: Traffic, mode: str, shape: Shape, *, is_virtual: bool) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        started = start_llm(replace(setup, extra={**setup.extra, "policy": "lru"}) if mode == "lru" else setup)
        fill_weights(started.model(), shape)
        wait_until_usable(started, setup, _PINNING)
        self._core = started.engine.llm_engine
        self._side = self._core.engine_core.engine_core.scheduler.connector._host.side
        self.clock = _VirtualClock() if is_virtual else _Clock()
        if is_virtual:
            pool = self._side.control._engine.pool
            pool.clock = pool.requests._clock = self.clock
        self._is_virtual = is_virtual
        self._traffic, self._mode, self._vocabulary = traffic, mode, shape.vocabulary
        self._names = count()
        self._asked: dict[str, _Asked] = {}
        self._due: list[tuple[float, int, _Agent | None]] = []
        self._order = count()
        self.turns: list[Turn] = []
        self.answers: dict[int, int] = {}
        self._watch(self._core.engine_core.engine_core.scheduler.connector)
        self.busy = 0.0
        self.one_shots = 0

    def go(self) -> Found:
        traffic, clock = self._traffic, self.clock
        chance = random.Random(f"arrivals {traffic.seed}")
        began = clock()
        for number in range(traffic.agents):
            self._push(
                began + chance.random() * min(10.0, traffic.seconds / 8), _Agent(traffic, number, self._vocabulary)
            )
        while (now := clock()) < began + traffic.seconds:
            while self._due and self._due[0][0] <= now:
                at, _, agent = heappop(self._due)
                self._ask(at, agent)
            if self._core.has_unfinished_requests():
                self._step(chance, counted=now >= began + traffic.seconds / 4)
            elif self._is_virtual and self._side.has_pending_stores:
                self._core.step()
            else:
                clock.wait_until(self._due[0][0] if self._due else now + 1.0)
        return Found(
            mode=self._mode,
            seed=traffic.seed,
            turns=len(self.turns),
            recomputed=statistics.mean(turn.kind == KINDS[0] for turn in self.turns),
            found=sum(turn.cached for turn in self.turns) / sum(turn.known for turn in self.turns),
            ttft=[1e3 * sum(turn.parts) for turn in self.turns],
            split={kind: _split([turn for turn in self.turns if turn.kind == kind]) for kind in KINDS},
            busy=self.busy,
            asked=next(self._names),
            one_shots=self.one_shots,
            answers=self.answers,
        )

    def _watch(self, connector: Any) -> None:
        """Note when vLLM looks up a prefix, starts a load and learns of the load's end."""
        look_up, admit, note = (
            connector.get_num_new_matched_tokens,
            connector.update_state_after_alloc,
            connector.update_connector_output,
        )

        def asked(request: Any, computed: int) -> Any:
            one = self._of(request.request_id)
            if one is not None and not one.looked_up:
                one.looked_up = self.clock()
            return look_up(request, computed)

        def admitted(request: Any, blocks: Any, tokens: int) -> Any:
            one = self._of(request.request_id)
            if one is not None:
                one.loaded += tokens
            return admit(request, blocks, tokens)

        def noted(output: Any) -> Any:
            for name in output.finished_recving or ():
                if (one := self._of(name)) is not None:
                    one.loaded_at = self.clock()
            return note(output)

        connector.get_num_new_matched_tokens = asked
        connector.update_state_after_alloc = admitted
        connector.update_connector_output = noted

    def _of(self, name: str) -> _Asked | None:
        """Return the request of this name, to which vLLM may have added something."""
        return self._asked.get("-".join(name.split("-")[:2]))

    def _push(self, at: float, agent: _Agent | None) -> None:
        heappush(self._due, (at, next(self._order), agent))

    def _ask(self, at: float, agent: _Agent | None) -> None:
        if agent is None:
            chance = random.Random(f"one shot {self._traffic.seed} {self.one_shots}")
            self.one_shots += 1
            prompt = [chance.randrange(10, self._vocabulary) for _ in range(self._traffic.one_shot_tokens)]
        else:
            prompt = agent.prompt()
        hints = None if agent is None else agent.hints(self._mode)
        params = SamplingParams(
            max_tokens=self._traffic.answer,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            extra_args=None if hints is None else {"kv_transfer_params": {"kvstow": hints}},
        )
        name = f"agents-{next(self._names)}"
        self._asked[name] = _Asked(agent, at, 0 if agent is None else agent.known, _checksum(prompt))
        self._core.add_request(name, {"prompt_token_ids": prompt}, params)

    def _step(self, chance: random.Random, *, counted: bool) -> None:
        began, started = time.perf_counter(), self.clock()
        outputs = self._core.step()
        self.busy += time.perf_counter() - began
        self.clock.stepped()
        now = self.clock()
        for output in outputs:
            asked = self._asked[output.request_id]
            if asked.parts is None and output.outputs[0].token_ids:
                looked_up = asked.looked_up or started
                ready = max(looked_up, asked.loaded_at)
                asked.parts = looked_up - asked.at, ready - looked_up, started - ready, now - started
                asked.cached = output.num_cached_tokens or 0
            asked.tokens = list(output.outputs[0].token_ids)
            if output.finished:
                del self._asked[output.request_id]
                self._ended(asked, now, chance, counted=counted)

    def _ended(self, asked: _Asked, now: float, chance: random.Random, *, counted: bool) -> None:
        agent = asked.agent
        if agent is None:
            return
        self.answers[asked.prompt] = _checksum(asked.tokens)
        if counted and asked.known and asked.parts is not None:
            self.turns.append(Turn(asked.known, min(asked.cached, asked.known), asked.loaded, asked.parts))
        self._push(now + agent.answered(asked.tokens), agent)
        for _ in range(int(self._traffic.one_shot) + (chance.random() < self._traffic.one_shot % 1)):
            self._push(now + chance.random() * self._traffic.gap, None)


def measure(setup: Setup, traffic: Traffic, mode: str, shape: Shape, is_virtual: bool) -> Found:
    return _Run(setup, traffic, mode, shape, is_virtual=is_virtual).go()


def _checksum(tokens: Sequence[int]) -> int:
    return zlib.crc32(array("i", tokens).tobytes())


def _split(turns: Sequence[Turn]) -> tuple[int, list[float]]:
    return len(turns), [1e3 * statistics.median(part) for part in zip(*(turn.parts for turn in turns), strict=True)]


def _at(figures: Sequence[float], share: float) -> float:
    ordered = sorted(figures)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(title: str, found: Sequence[Found]) -> Table:
    head = [
        *("hints", "turns that came back", "recomputed more than half", "prefix tokens found"),
        *("first token: p50, ms", "p90, ms", "seconds in steps", "answers that differ"),
    ]
    return Table(title, head, [*_rows(found)])


def split_table(found: Sequence[Found]) -> Table:
    head = ["hints", "prefix", "turns", "until looked up", "load", "until the step", "the step"]
    rows = [
        [one.label, kind, str(count), *(f"{part:.1f}" for part in parts)]
        for one in found
        for kind, (count, parts) in one.split.items()
        if count
    ]
    return Table("The time to the first token, medians of its parts in ms", head, rows)


def _rows(found: Sequence[Found]) -> Iterator[list[str]]:
    first: dict[int, Found] = {}
    for one in found:
        others = first.setdefault(one.seed, one).answers
        same = [answer == others[prompt] for prompt, answer in one.answers.items() if prompt in others]
        yield [
            one.label,
            f"{one.turns:,}",
            f"{one.recomputed:.1%}",
            f"{one.found:.1%}",
            f"{_at(one.ttft, 0.5):.1f}",
            f"{_at(one.ttft, 0.9):.1f}",
            f"{one.busy:.1f}",
            f"{same.count(False):,} of {len(same):,}",
        ]


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    results = open_results("agents", options)
    with tempfile.TemporaryDirectory() as folder:
        _measure(options, Path(folder) / "model", results)
    return 0


def _traffic(options: argparse.Namespace, seed: int) -> Traffic:
    if options.tiny:
        sizes = {"system": 64, "first": 128, "grows": 48, "answer": 4, "one_shot_tokens": 256}
        return Traffic(10, turns=8, gap=8.0, seconds=options.seconds, one_shot=options.one_shot, seed=seed, **sizes)
    return Traffic(
        options.agents,
        turns=options.turns,
        gap=options.gap,
        system=options.system,
        first=options.first,
        grows=options.grows,
        one_shot=options.one_shot,
        seconds=options.seconds,
        seed=seed,
    )


def _pool_bytes(traffic: Traffic, shape: Shape, tiny: bool) -> int:
    return traffic.working_set() // 2 * shape.token_bytes(4 if tiny else 2)


def _measure(options: argparse.Namespace, model: Path, results: Results) -> None:
    shape = SHAPES["tiny" if options.tiny else options.shape]
    rounds = [_traffic(options, number) for number in range(options.rounds)]
    longest = max(traffic.max_tokens for traffic in rounds)
    write_model(model, shape, weights=False, config={"max_position_embeddings": max(65536, longest)})
    found: list[Found] = []
    for traffic in rounds:
        working_set = traffic.working_set()
        setup = Setup(
            model,
            "kvstow",
            pool_bytes=_pool_bytes(traffic, shape, options.tiny),
            max_tokens=longest,
            gpu_blocks=max(working_set // 8, longest) // block_tokens() + 16,
            batch_tokens=2048 if options.tiny else 16384,
            graphs=options.graphs,
            attention=options.attention,
            extra=options.extra,
        )
        results.add("traffic", seed=traffic.seed, working_set_tokens=working_set, pool_bytes=setup.pool_bytes)
        for mode in options.modes:
            timeout = _PATIENCE + 2 * traffic.seconds
            args = (setup, traffic, mode, shape, options.tiny)
            one = results.attempt("agents", partial(run, timeout, measure, *args))
            if one is not None:
                found.append(one)
    if found:
        agents = f"{rounds[0].agents} agents, a pool of half of their conversations"
        results.show(table(f"{'tiny' if options.tiny else options.shape}, {agents}", found))
        results.show(split_table(found))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("agents", __doc__, shape=True)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--turns", type=int, default=12, help="of a conversation, the median")
    parser.add_argument("--gap", type=float, default=8.0, help="seconds between two turns, the median")
    parser.add_argument("--system", type=int, default=512, help="tokens that all conversations begin with")
    parser.add_argument("--first", type=int, default=1500, help="tokens of the first turn")
    parser.add_argument("--grows", type=int, default=400, help="tokens that a turn adds, on average")
    parser.add_argument("--seconds", type=float, default=150.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=1, help="of all modes, each with other agents")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["off", "exact"])
    parser.add_argument("--one-shot", type=float, default=0.5, help="prompts that never repeat, for each turn")
    parser.add_argument("--attention", default=ATTENTION, help="vLLM's attention backend; default: %(default)s")
    add_engine(parser, graphs="none")
    return parser
