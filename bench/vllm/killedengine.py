"""An engine under load that is killed and restarted, and the answers that it must give."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from bench.vllm.engines import Setup, start_llm
from bench.vllm.process import Measurement, MeasurementError

ENDING = 60.0  # seconds

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts: `systems` beginnings, with `questions` after each. Sizes are in tokens. `at_once` is the number of
    requests in a round."""

    systems: int = 24
    questions: int = 16
    system_tokens: tuple[int, int] = (256, 1536)
    question_tokens: tuple[int, int] = (32, 640)
    answer_tokens: int = 48
    at_once: int = 24

    @property
    def max_tokens(self) -> int:
        return self.system_tokens[1] + self.question_tokens[1] + self.answer_tokens

    def prompts(self, vocabulary: int) -> list[Prompt]:
        chance = random.Random(0)

        def text(sizes: tuple[int, int]) -> Prompt:
            return tuple(chance.randrange(10, vocabulary) for _ in range(chance.randint(*sizes)))

        systems = [text(self.system_tokens) for _ in range(self.systems)]
        return [system + text(self.question_tokens) for system in systems for _ in range(self.questions)]


FULL = Load()
TINY = Load(systems=3, questions=3, system_tokens=(64, 128), question_tokens=(16, 64), answer_tokens=8, at_once=3)


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected answer to one prompt: the tokens of the longest answer, and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Tally:
    """Counts of the requests of one engine over all of its processes. `differing` counts answers with other tokens, and
    `logprobs` other answers with another log-probability. `cached_tokens` counts tokens of prompts that were not
    computed."""

    requests: int = 0
    differing: int = 0
    logprobs: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


def expect(setup: Setup, load: Load, prompts: Sequence[Prompt]) -> list[Expected]:
    """Return the longest answer to each prompt, from an engine without a connector."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    outputs = _generate(start_llm(setup).engine, prompts, [load.answer_tokens] * len(prompts))
    return [_answer(output) for output in outputs]


def serve(
    setup: Setup, load: Load, prompts: Sequence[Prompt], expected: Sequence[Expected], seed: str, tally: Path
) -> None:
    """Send requests without a pause, until a file beside `tally` exists that ends in `.stop`. Each round adds a line to
    `tally`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine, chance = start_llm(setup).engine, random.Random(f"{seed} {os.getpid()}")
    stop = tally.with_suffix(".stop")
    while not stop.exists():
        numbers = chance.sample(range(len(prompts)), load.at_once)
        lengths = [chance.randint(1, load.answer_tokens) for _ in numbers]
        outputs = _generate(engine, [prompts[number] for number in numbers], lengths)
        counted = Tally()
        for number, length, output in zip(numbers, lengths, outputs, strict=True):
            answer, wanted = _answer(output), expected[number]
            is_same = answer.tokens == wanted.tokens[:length]
            counted.requests += 1
            counted.differing += not is_same
            counted.logprobs += is_same and answer.logprobs != wanted.logprobs[:length]
            counted.prompt_tokens += len(prompts[number])
            counted.cached_tokens += output.num_cached_tokens or 0
        with tally.open("a") as file:
            file.write(json.dumps(asdict(counted)) + "\n")
    for _ in range(50):  # steps, in which stores end
        engine.llm_engine.step()
        time.sleep(0.01)


def _generate(engine: Any, prompts: Sequence[Prompt], lengths: Sequence[int]) -> list[Any]:
    params = [
        SamplingParams(max_tokens=length, temperature=0, logprobs=0, detokenize=False, ignore_eos=True)
        for length in lengths
    ]
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs: list[Any] = engine.generate(inputs, params, use_tqdm=False)
    for output, length in zip(outputs, lengths, strict=True):
        if len(output.outputs[0].token_ids) != length:
            raise RuntimeError(f"a request ended with {output.outputs[0].finish_reason!r}")
    return outputs


def _answer(output: Any) -> Expected:
    (completion,) = output.outputs
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return Expected(list(completion.token_ids), [position[token].logprob for token, position in pairs])


@dataclass(slots=True)
class KilledEngine:
    """An engine in a process that is restarted when it was killed. `arguments` are those of `serve`."""

    name: str
    folder: Path
    arguments: tuple[Setup, Load, Sequence[Prompt], Sequence[Expected]]
    failures: list[str] = field(default_factory=list)
    _process: Measurement[None] | None = None

    @property
    def tally(self) -> Path:
        return self.folder / f"{self.name}.tally"

    def start(self) -> None:
        setup, load, prompts, expected = self.arguments
        self._process = Measurement(serve, setup, load, prompts, expected, self.name, self.tally)

    def kill(self) -> None:
        self.check()
        if self._process is not None:
            self._process.kill()
        self._process = None

    def check(self) -> None:
        """If the process has ended by itself, note why, and restart it."""
        if self._process is not None and self._process.is_over:
            self._end(0.0)
            self.start()

    def stop(self) -> None:
        self.tally.with_suffix(".stop").touch()
        self._end(ENDING)

    def count(self) -> Tally:
        """Return the counts. The last line is ignored, because it may be incomplete."""
        lines = self.tally.read_text().split("\n")[:-1] if self.tally.exists() else []
        rounds = [json.loads(line) for line in lines]
        return Tally(**{name: sum(one[name] for one in rounds) for name in asdict(Tally())})

    def _end(self, patience: float) -> None:
        process, self._process = self._process, None
        try:
            if process is not None:
                process.result(patience)
        except MeasurementError as error:
            self.failures.append(f"{self.name}: {str(error)[-2000:]}")
