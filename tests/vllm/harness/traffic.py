"""Requests: shared prefixes, conversations, and clients that go away."""

from __future__ import annotations

from random import Random

from tests.vllm.harness.core import EngineCore
from tests.vllm.harness.sequence import VOCABULARY
from tests.vllm.harness.setup import BLOCK_TOKENS, Setup

_LONGEST_PROMPT = 320  # of 512 tokens that the model takes, and fewer blocks than there are on the device
_MOST_TOKENS = 40
_MOST_WAITING = 12


class Traffic:
    """Adds `setup.requests` requests over time and aborts some, now and then while they load."""

    def __init__(self, setup: Setup, random: Random, core: EngineCore) -> None:
        self._setup, self._random, self._core = setup, random, core
        self._prefixes = [self._tokens(random.randint(60, 200)) for _ in range(8)]
        self._added = 0

    @property
    def is_over(self) -> bool:
        return self._added == self._setup.requests

    def step(self) -> None:
        waiting = self._core.scheduler.get_request_counts()[1]
        for _ in range(self._random.choice((0, 0, 1, 2))):
            if self.is_over or waiting >= _MOST_WAITING:
                continue
            if self._setup.fan_rate and self._random.random() < self._setup.fan_rate and self._core.outputs:
                self._fan_out()
            else:
                self._add(self._prompt())
        if not self.is_over and self._random.random() < self._setup.abort_rate:
            self._abort()

    def _fan_out(self) -> None:
        """Some requests with the prompt of an earlier one. Most of them go on from there, or from its middle."""
        sequence = self._core.sequences[self._random.choice(list(self._core.outputs))]
        prompt = sequence.tokens[: sequence.num_prompt_tokens]
        for _ in range(self._random.randint(2, 6)):
            if self.is_over:
                return
            begin = prompt[: self._random.choice((len(prompt), len(prompt), len(prompt) // 2))]
            question = self._tokens(self._random.choice((0, 10, 60)))
            self._add((begin + question)[:_LONGEST_PROMPT])

    def _add(self, prompt: list[int]) -> None:
        request_id = f"request-{self._added}"
        self._added += 1
        max_tokens = self._random.randint(1, _MOST_TOKENS)
        cache_salt = "a salt" if self._random.random() < 0.1 else ""
        self._core.add(request_id, prompt, max_tokens, cache_salt)

    def _prompt(self) -> list[int]:
        """A prefix that others have too and a question, or an earlier request with its answer and another question, or
        the whole blocks of an earlier prompt and no question."""
        if self._setup.repeat_rate and self._random.random() < self._setup.repeat_rate and self._core.outputs:
            sequence = self._core.sequences[self._random.choice(list(self._core.outputs))]
            if whole := sequence.num_prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS:
                return sequence.tokens[:whole]
        question = self._tokens(self._random.randint(1, 60))
        if self._random.random() < 0.3 and self._core.outputs:
            earlier = self._random.choice(list(self._core.outputs))
            sequence = self._core.sequences[earlier]
            end = sequence.num_prompt_tokens + len(self._core.outputs[earlier])
            if end + len(question) <= _LONGEST_PROMPT:
                return sequence.tokens[:end] + question
        prefix = self._random.choice(self._prefixes)
        if self._random.random() < 0.2:
            prefix = prefix[: self._random.randint(1, len(prefix))]
        return prefix + question

    def _abort(self) -> None:
        """One that loads, if there is one: those are rare."""
        requests = self._core.scheduler.requests.values()
        loading = [request.request_id for request in requests if request.status.name == "WAITING_FOR_REMOTE_KVS"]
        running = [request.request_id for request in requests if not request.is_finished()]
        if not running:
            return
        self._core.report.aborted_loads += bool(loading)
        self._core.abort(self._random.choice(loading or running))

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]
