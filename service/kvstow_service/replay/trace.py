"""What a replay replays: request traces, read from a file or generated, when their requests are due, and the shape of
the KV cache that they fill.

A trace is one JSON object a line, the schema of the Mooncake traces. `hash_ids` holds one id per block of
`BLOCK_TOKENS` prompt tokens. Equal ids mean equal prompts up to and including that block, so an id alone is the prefix
hash of its block. What `kvstow trace record` writes has an id for each block of the pool, computed ones included, and
`looked_up`.

Generated traces are multi-turn: conversations that start from shared system prompts and grow by a question and an
answer. Their figures follow the conversation trace of Mooncake in kind: long prompts, think times of tens of seconds, a
few prompts that most conversations share.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

from kvstow.errors import ConfigError, InvalidRequestError
from kvstow.keys import BlockKey, make_key
from kvstow.layout import KVLayout, Region

BLOCK_TOKENS = 512
_HASH_BYTES = 32  # as long as the digests of a real prefix hash, so that keys cost what they will cost


class TraceRequest(NamedTuple):
    """One request. `timestamp` in milliseconds, lengths in tokens. `looked_up`: from where to where in `hash_ids` it
    has looked up its blocks, in a trace that was recorded: the GPU had those before, and has computed those behind.
    None for all of them."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    looked_up: tuple[int, int] | None = None

    def keys(self) -> list[BlockKey]:
        """The keys of its blocks, in order."""
        return [make_key(0, hash_id.to_bytes(_HASH_BYTES, "big")) for hash_id in self.hash_ids]

    def to_line(self) -> str:
        """The request as a line of a trace, without the newline."""
        return json.dumps({name: value for name, value in self._asdict().items() if value is not None})

    @property
    def asked(self) -> tuple[int, int]:
        """From where to where it looks up its blocks."""
        return self.looked_up or (0, len(self.hash_ids))


def read_trace(path: str, *, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of the file at `path`, or of standard input for `-`; all without a limit.

    Empty lines are skipped. Raises `InvalidRequestError` naming the file, the line and what is wrong; also for a
    trace without requests.
    """
    try:
        if path == "-":
            requests = list(islice(parse_trace(sys.stdin.buffer, "<stdin>"), limit))
        else:
            with open(path, "rb") as lines:
                requests = list(islice(parse_trace(lines, path), limit))
    except OSError as error:
        raise InvalidRequestError(f"cannot read the trace {path}: {error.strerror}") from error
    if not requests:
        raise InvalidRequestError(f"{path} holds no requests")
    return requests


def parse_trace(lines: Iterable[bytes], name: str) -> Iterator[TraceRequest]:
    """The requests in `lines`; errors call the source `name`."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _parse_request(json.loads(line))
        except ValueError as error:  # also of JSON and of UTF-8
            raise InvalidRequestError(f"{name}:{number}: {error}") from error


def _parse_request(value: Any) -> TraceRequest:
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} found; a request is a JSON object")
    missing = [field for field in TraceRequest._fields if field != "looked_up" and field not in value]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    timestamp, hash_ids = value["timestamp"], value["hash_ids"]
    if type(timestamp) not in (int, float) or not 0 <= timestamp < float("inf"):
        raise ValueError(f"timestamp is {timestamp!r}; allowed: milliseconds, 0 or more")
    for field in ("input_length", "output_length"):
        if type(value[field]) is not int or value[field] < 0:
            raise ValueError(f"{field} is {value[field]!r}; allowed: a whole number of tokens, 0 or more")
    if not isinstance(hash_ids, list):
        raise ValueError(f"hash_ids is {hash_ids!r}; allowed: a list of whole numbers")
    _check_hash_ids(hash_ids)
    looked_up = value.get("looked_up")
    if looked_up is not None:
        looked_up = _positions(looked_up, len(hash_ids))
    return TraceRequest(timestamp, value["input_length"], value["output_length"], tuple(hash_ids), looked_up)


def _positions(value: Any, count: int) -> tuple[int, int]:
    match value:
        case [int(first), int(stop)] if 0 <= first <= stop <= count:
            return first, stop
    raise ValueError(f"looked_up is {value!r}; allowed: two whole numbers, growing, from 0 to {count}")


def _check_hash_ids(hash_ids: list[Any]) -> None:
    for hash_id in hash_ids:
        if type(hash_id) is not int or not 0 <= hash_id < 1 << 8 * _HASH_BYTES:
            raise ValueError(f"hash_ids holds {hash_id!r}; allowed: whole numbers from 0 to below 2^{8 * _HASH_BYTES}")
    if len(set(hash_ids)) < len(hash_ids):
        twice = next(hash_id for hash_id in hash_ids if hash_ids.count(hash_id) > 1)
        raise ValueError(f"hash_ids holds {twice} twice; an id names a whole prefix, so it occurs once in a request")


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a trace is replayed.

    `concurrency`: requests in flight at once; with 1 each is stored before the next looks up. `rate`: requests that
    start per second. `time_scale`: start them by their timestamps, this many times as fast as recorded. With neither
    they start as fast as possible. `drain_seconds`: how long a stop waits for what is in flight. `prefill_rate`: tokens
    per second that the model computes, one request at a time; None: no limit.
    """

    concurrency: int = 1
    rate: float | None = None
    time_scale: float | None = None
    drain_seconds: float = 10.0
    prefill_rate: float | None = None

    def __post_init__(self) -> None:
        if type(self.concurrency) is not int or self.concurrency < 1:
            raise ConfigError("concurrency", self.concurrency, "a whole number, 1 or more")
        for key in ("rate", "time_scale", "prefill_rate"):
            value = getattr(self, key)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(key, value, "more than 0")
        if self.rate is not None and self.time_scale is not None:
            raise ConfigError("time_scale", self.time_scale, "either rate or time_scale, not both")
        if not 0 <= self.drain_seconds < float("inf"):
            raise ConfigError("drain_seconds", self.drain_seconds, "0 or more seconds")

    def prefill_seconds(self, blocks: int) -> float:
        """How long the model computes so many blocks."""
        return blocks * BLOCK_TOKENS / self.prefill_rate if self.prefill_rate is not None else 0.0

    def due(self, index: int, request: TraceRequest, first: TraceRequest) -> float:
        """Seconds after the start of the replay at which `request`, the trace's `index`th, is due."""
        if self.rate is not None:
            return index / self.rate
        if self.time_scale is not None:
            return (request.timestamp - first.timestamp) / 1000 / self.time_scale
        return 0.0


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


def generate_trace(shape: TraceShape, *, limit: int | None = None) -> list[TraceRequest]:
    """The requests of all conversations in order of time, the first `limit` of them. The same shape gives the
    same trace."""
    if limit is not None and limit < 1:
        raise ConfigError("requests", limit, "a whole number, 1 or more")
    rng = random.Random(shape.seed)
    ids = count()
    prompts = [[next(ids) for _ in range(rng.randint(*_PROMPT_BLOCKS))] for _ in range(shape.shared_prompts)]
    requests: list[TraceRequest] = []
    started = 0.0
    for _ in range(shape.sessions):
        started += rng.expovariate(_ARRIVALS_PER_SECOND)
        requests.extend(_conversation(rng, ids, _pick(rng, prompts), shape.turns, started))
    return sorted(requests, key=lambda request: request.timestamp)[:limit]


def _pick(rng: random.Random, prompts: list[list[int]]) -> list[int]:
    """The whole blocks of a system prompt, whose popularity falls with its rank, as 1/rank."""
    if not prompts:
        return []
    return rng.choices(prompts, weights=[1 / rank for rank in range(1, len(prompts) + 1)])[0]


def _conversation(
    rng: random.Random, ids: Iterator[int], prompt: list[int], turns: int, started: float
) -> Iterator[TraceRequest]:
    """Each turn's prompt is all that was said before and a question. Whole blocks keep their ids from turn to
    turn; the last block, if it is not full, has an id of its own, because the next turn fills it differently."""
    seconds = started
    tokens, whole = len(prompt) * BLOCK_TOKENS, [*prompt]
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


_EVEN_LAYERS = 4  # enough to exercise gathering from several regions


@dataclass(frozen=True, slots=True)
class Shape:
    """One rank's KV cache: `layers` regions with a page of `page_bytes` per block, say of 16 tokens."""

    name: str
    layers: int
    page_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.layers * self.page_bytes

    def layout(self, num_blocks: int) -> KVLayout:
        names = (f"layer.{layer}" for layer in range(self.layers))
        return KVLayout(tuple(Region(name, num_blocks, self.page_bytes, self.page_bytes) for name in names))


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3-8b", layers=32, page_bytes=64 << 10),  # 8 KV heads x 128 x K and V, bf16, 16 tokens
        Shape("llama-3-70b-tp8", layers=80, page_bytes=8 << 10),  # the same on each of 8 ranks: one KV head
        Shape("mla-18k", layers=61, page_bytes=18 << 10),  # DeepSeek-V3: 576 values a token, bf16, 16 tokens
        Shape("gpt-oss-32k", layers=36, page_bytes=32 << 10),  # gpt-oss-120b: 8 KV heads x 64 x K and V, bf16
    )
}


def shape_named(name: str) -> Shape:
    """Raises `ConfigError` for a name that is not in `SHAPES`."""
    if name not in SHAPES:
        raise ConfigError("--shape", name, " or ".join(SHAPES))
    return SHAPES[name]


def even_shape(slot_bytes: int) -> Shape:
    """`slot_bytes` over four equal layers, or one where four do not divide it."""
    layers = _EVEN_LAYERS if slot_bytes % _EVEN_LAYERS == 0 else 1
    return Shape("even", layers, slot_bytes // layers)
