"""What the two engines of the program `tier` do."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np

from bench.vllm.engines import Setup
from bench.vllm.model import Shape
from bench.vllm.results import Results
from bench.vllm.tierengine import Answer, Prompt, TierEngine
from bench.vllm.tierfigures import COMPUTED, FORCED, GATED, GPU, OWN, POOL, Given, Steps, Stored, Tiered

TIMEOUT = 240.0
_STEPS = 300


@dataclass(frozen=True, slots=True)
class Prompts:
    """`number`: of each kind that is measured; `beside`: that are fetched while b decodes. Sizes in tokens. `on_gpu`:
    how many a GPU's cache holds."""

    number: int
    tokens: int = 16000
    beside: int = 2
    on_gpu: int = 2
    decoded: int = 8000

    @property
    def of_a(self) -> int:
        """One warms up."""
        return 1 + 2 * self.number + self.beside

    @property
    def stored(self) -> int:
        """With those that b computes: it puts them as well."""
        return self.of_a + self.number + 2

    def make(self, vocabulary: int) -> tuple[list[Prompt], list[Prompt]]:
        """Those of a's, and those that only b asks."""
        chance = random.Random(0)
        made = [[chance.randrange(10, vocabulary) for _ in range(self.tokens)] for _ in range(self.stored)]
        return made[: self.of_a], made[self.of_a :]


TINY = Prompts(number=2, tokens=640, beside=1, decoded=2000)


def store(setup: Setup, fill: Callable[[Any], None] | None, prompts: Sequence[Prompt], is_stored: Event) -> Stored:
    """Engine a. It ends when all is in the store, and sets `is_stored` then."""
    engine = TierEngine(setup, fill)
    engine.ask([7] * len(prompts[0]))
    engine.wait_connected()
    engine.settle()
    before = _put_bytes(engine)
    began = time.perf_counter()
    answers = [engine.ask(prompt) for prompt in prompts]
    engine.settle()
    took, counters = time.perf_counter() - began, engine.status()["counters"]
    is_stored.set()
    return Stored(
        engine.start_seconds,
        answers,
        counters["put_blocks"],
        counters["failed_put_blocks"],
        (_put_bytes(engine) - before) / took / 1e9,
        len({answer.tokens for answer in answers}),
    )


def _put_bytes(engine: TierEngine) -> int:
    return sum(client["put_bytes"] for client in engine.status()["clients"])


class _Asking:
    """Engine b."""

    def __init__(self, engine: TierEngine, prompts: Prompts, shape: Shape, results: Results) -> None:
        self._engine, self._prompts, self._shape, self._results = engine, prompts, shape, results
        self.known, self.unknown = prompts.make(shape.vocabulary)
        self.answers: dict[str, list[Given]] = {}
        self.steps: list[Steps] = []

    def warm_up(self) -> None:
        self._engine.ask([9] * self._prompts.tokens)
        self._engine.wait_connected()
        self._engine.settle()

    def run(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`/v1/tier` after the fetches that were waited for, and after the gate has decided."""
        number, engine = self._prompts.number, self._engine
        forced, gated = range(1, 1 + number), range(1 + number, 1 + 2 * number)
        for prompt in self.unknown[:number]:
            computed = engine.ask(prompt)
            self._note(COMPUTED, None, computed)
            self._note(OWN, computed, engine.ask(prompt))
        self._decode(self.unknown[number:])
        with engine.every_fetch_pays():
            engine.ask(self.known[0])
            self._ask(FORCED, forced)
            after_forced = engine.status()
        engine.forget_gpu()
        self._ask(POOL, forced)
        for each in forced:
            engine.ask(self.known[each])
            self._ask(GPU, [each])
        engine.settle()
        self._ask(GATED, gated)
        after_gate = engine.status()
        self._results.add("gate", decision=after_gate["decision"])
        engine.settle()
        self._decode_beside_fetches(self.known[1 + 2 * number :])
        return after_forced, after_gate

    def _ask(self, way: str, which: Sequence[int]) -> None:
        for each in which:
            self._note(way, each, self._engine.ask(self.known[each]))

    def _note(self, way: str, other: int | Answer | None, answer: Answer) -> None:
        self.answers.setdefault(way, []).append(Given(answer, other))
        self._results.add("answer", way=way, ms=answer.seconds * 1e3, cached=answer.cached)

    def _decode(self, unknown: Sequence[Prompt]) -> None:
        """Steps alone, and beside puts."""
        engine = self._engine
        engine.settle()
        with engine.decoding(self._shape.vocabulary, self._prompts.decoded):
            self._note_steps("nothing", engine.steps(lambda: False, _STEPS))
            gaps = []
            for prompt in unknown:
                engine.finish(engine.begin(prompt))
                gaps += engine.steps(lambda: not _is_putting(engine), self._prompts.decoded // 4)
            self._note_steps("puts", gaps)
        engine.settle()

    def _decode_beside_fetches(self, known: Sequence[Prompt]) -> None:
        engine, gaps = self._engine, list[float]()
        with engine.every_fetch_pays(), engine.decoding(self._shape.vocabulary, self._prompts.decoded):
            for prompt in known:
                before = engine.fleet.counters.fetched_blocks
                name = engine.begin(prompt)
                engine.steps(lambda: engine.fleet.status().fetching_blocks > 0, self._prompts.decoded // 8)
                gaps += engine.steps(lambda: not engine.fleet.status().fetching_blocks, self._prompts.decoded // 4)
                engine.finish(name)
                if engine.fleet.counters.fetched_blocks == before:
                    raise RuntimeError("a prompt that was stored was not fetched")
        self._note_steps("fetches", gaps)

    def _note_steps(self, beside: str, gaps: Sequence[float]) -> None:
        if not gaps:
            return
        p50, p99 = (float(value) for value in np.percentile(gaps, [50, 99]))
        self.steps.append(Steps(beside, len(gaps), p50, p99, max(gaps)))
        self._results.add("steps", **asdict(self.steps[-1]))


def _is_putting(engine: TierEngine) -> bool:
    status = engine.fleet.status()
    return status.putting_blocks + status.waiting_blocks > 0


def ask(
    setup: Setup,
    fill: Callable[[Any], None] | None,
    prompts: Prompts,
    shape: Shape,
    results: Results,
    is_stored: Event,
) -> tuple[Tiered, dict[str, list[Given]]]:
    """Engine b. It asks when all of a's is stored. Also its answers, for a comparison with a's."""
    engine = TierEngine(setup, fill)
    asking = _Asking(engine, prompts, shape, results)
    asking.warm_up()
    if not is_stored.wait(TIMEOUT):
        raise TimeoutError("the other engine has not stored its prompts")
    forced, gated = asking.run()
    return Tiered(engine.start_seconds, [], asking.steps, forced, gated), asking.answers
