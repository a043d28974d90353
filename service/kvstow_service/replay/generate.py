"""Multi-turn traces: conversations that start from shared system prompts and grow by a question and an answer.

The figures follow the conversation trace of Mooncake in kind: long prompts, think times of tens of seconds, a
few prompts that most conversations share.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from kvstow.errors import ConfigError
from kvstow_service.replay.trace import BLOCK_TOKENS, TraceRequest

_ARRIVALS_PER_SECOND = 0.5
_TOKENS_PER_SECOND = 40.0
_THINK_SECONDS = 25.0  # median
_QUESTION_TOKENS = 600.0  # median: people paste documents
_ANSWER_TOKENS = 300.0  # median
_PROMPT_BLOCKS = (2, 12)


@dataclass(frozen=True, slots=True)
class TraceShape:
    """`sessions` conversations of `turns` turns on average over `shared_prompts` system prompts (0: none shared)."""

    sessions: int = 100
    turns: int = 5
    shared_prompts: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for key, least in (("sessions", 1), ("turns", 1), ("shared_prompts", 0)):
            if getattr(self, key) < least:
                raise ConfigError(key, getattr(self, key), f"a whole number, {least} or more")


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A system prompt: whole blocks, which all conversations that start with it share."""

    hash_ids: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.hash_ids) * BLOCK_TOKENS


def generate_trace(shape: TraceShape, *, limit: int | None = None) -> list[TraceRequest]:
    """The requests of all conversations in order of time, the first `limit` of them. The same shape gives the
    same trace."""
    if limit is not None and limit < 1:
        raise ConfigError("requests", limit, "a whole number, 1 or more")
    rng = random.Random(shape.seed)
    ids = count()
    prompts = [
        _Prompt(tuple(next(ids) for _ in range(rng.randint(*_PROMPT_BLOCKS)))) for _ in range(shape.shared_prompts)
    ]
    requests: list[TraceRequest] = []
    started = 0.0
    for _ in range(shape.sessions):
        started += rng.expovariate(_ARRIVALS_PER_SECOND)
        requests.extend(_conversation(rng, ids, _pick(rng, prompts), shape.turns, started))
    return sorted(requests, key=lambda request: request.timestamp)[:limit]


def _pick(rng: random.Random, prompts: list[_Prompt]) -> _Prompt:
    """Popularity falls with the rank, as 1/rank."""
    if not prompts:
        return _Prompt(())
    return rng.choices(prompts, weights=[1 / rank for rank in range(1, len(prompts) + 1)])[0]


def _conversation(
    rng: random.Random, ids: Iterator[int], prompt: _Prompt, turns: int, started: float
) -> Iterator[TraceRequest]:
    """Each turn's prompt is all that was said before and a question. Whole blocks keep their ids from turn to
    turn; the last block, if it is not full, has an id of its own, because the next turn fills it differently."""
    seconds = started
    tokens = prompt.tokens
    whole = list(prompt.hash_ids)
    for _ in range(rng.randint(1, 2 * turns - 1)):
        tokens += _tokens(rng, _QUESTION_TOKENS)
        whole.extend(next(ids) for _ in range(tokens // BLOCK_TOKENS - len(whole)))
        partial = (next(ids),) if tokens % BLOCK_TOKENS else ()
        answer = _tokens(rng, _ANSWER_TOKENS)
        yield TraceRequest(round(seconds * 1000), tokens, answer, (*whole, *partial))
        tokens += answer
        seconds += answer / _TOKENS_PER_SECOND + _THINK_SECONDS * rng.lognormvariate(0.0, 0.7)


def _tokens(rng: random.Random, median: float) -> int:
    return 1 + int(median * rng.lognormvariate(0.0, 0.8))
