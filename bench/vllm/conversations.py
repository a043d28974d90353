"""A load of concurrent conversations of several turns. Its requests depend only on a seed and on the answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind


@dataclass(frozen=True, slots=True)
class Load:
    """Sizes are in tokens, as the least and the most. Each of `clients` alternates between `beside` conversations, then
    begins others.

    Conversations begin with one of `systems` texts. One turn in `one_in_abandoned` is aborted soon after it was sent.
    """

    clients: int = 32
    beside: int = 4
    turns: int = 6
    systems: int = 8
    system_tokens: tuple[int, int] = (128, 512)
    question_tokens: tuple[int, int] = (32, 320)
    answer_tokens: tuple[int, int] = (16, 48)
    one_in_abandoned: int = 50
    seed: int = 0

    @property
    def max_tokens(self) -> int:
        return self.system_tokens[1] + self.turns * (self.question_tokens[1] + self.answer_tokens[1])


class Turn(NamedTuple):
    """The numbers of a client, of one of its conversations, and of a turn in that."""

    client: int
    conversation: int
    turn: int


class Answer(NamedTuple):
    """`logprob` is that of all tokens together. `cached` is how many tokens of the prompt were not computed."""

    tokens: tuple[int, ...]
    logprob: float
    prompt_tokens: int
    cached: int


class Talk:
    """Clients that talk to `engine`, an AsyncLLM. `answers` grows meanwhile."""

    def __init__(self, engine: Any, load: Load, vocabulary: int) -> None:
        self._engine, self._load, self._vocabulary = engine, load, vocabulary
        self._ids = count()
        self.answers: dict[Turn, Answer] = {}
        self.abandoned = 0

    async def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(self._client(client, deadline) for client in range(self._load.clients)))

    async def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        # With log probabilities, because they may differ even if the tokens are equal.
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        stream: AsyncIterator[Any] = self._engine.generate({"prompt_token_ids": prompt}, params, str(next(self._ids)))
        async for output in stream:
            last = output
        completion = last.outputs[0]
        if completion.finish_reason != "length":
            raise RuntimeError(f"a request ended with {completion.finish_reason!r}")
        cached, logprob = last.num_cached_tokens or 0, completion.cumulative_logprob
        return Answer(tuple(completion.token_ids), logprob, len(prompt), cached)

    async def _client(self, client: int, deadline: float) -> None:
        for first in count(0, self._load.beside):
            talks = [self._conversation(client, first + number) for number in range(self._load.beside)]
            for _ in range(self._load.turns):
                for talk in talks:
                    if time.monotonic() >= deadline:
                        return
                    await anext(talk, None)

    async def _conversation(self, client: int, conversation: int) -> AsyncIterator[None]:
        """Yield after each turn. All random numbers are drawn in advance, so that they do not depend on other
        clients."""
        load = self._load
        chance = random.Random(f"{load.seed} {client} {conversation}")
        system = chance.randrange(load.systems)
        history = self._tokens(random.Random(f"system {load.seed} {system}"), load.system_tokens)
        for turn in range(load.turns):
            history = history + self._tokens(chance, load.question_tokens)
            length = chance.randint(*load.answer_tokens)
            abandoned, patience = not chance.randrange(load.one_in_abandoned), chance.uniform(0, 0.1)
            if abandoned:
                self.abandoned += 1
                await self._abandon(history, length, patience)
                return
            answer = await self.ask(history, length)
            self.answers[Turn(client, conversation, turn)] = answer
            history = history + list(answer.tokens)
            yield

    async def _abandon(self, prompt: list[int], length: int, patience: float) -> None:
        try:
            await asyncio.wait_for(self.ask(prompt, length), patience)
        except TimeoutError:
            return

    def _tokens(self, chance: random.Random, sizes: tuple[int, int]) -> list[int]:
        return [chance.randrange(10, self._vocabulary) for _ in range(chance.randint(*sizes))]
