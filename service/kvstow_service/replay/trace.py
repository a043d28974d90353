"""Request traces, which are read from a file or generated, the times at which their requests are due, and the shape of
the KV cache that they fill.

A trace is a file of JSON objects, one on each line and one for each request, in order of time. It may be compressed
with gzip. A request has one id for each whole block of `BLOCK_TOKENS` tokens of its prompt, either in `hash_ids`, as in
the Mooncake traces, or in `runs`: first id, count, first id, count and so on. Equal ids mean equal prompts up to and
including that block, so an id stands for the prefix hash of its block. KVStow writes `runs`, which are far shorter if
ids are numbered in the order of their first use.

A request runs from `timestamp` to `end`, and `stop` says how it ended. Requests overlap, so a replay admits and ends
them in the order of `events`.

Generated traces consist of conversations that start from shared system prompts and grow by a question and an answer.
They have the character of Mooncake's conversation trace: long prompts, think times of tens of seconds, and a few
prompts that most conversations share.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import sys
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, count, islice, pairwise
from typing import Any, NamedTuple, cast, overload

from kvstow.endings import NO_ENDING, STATUSES, Ending
from kvstow.errors import ConfigError, InvalidRequestError
from kvstow.keys import BlockKey, make_key
from kvstow.layout import KVLayout, Region

BLOCK_TOKENS = 512
MOST_BLOCKS = 1 << 20
"""The limit for the blocks of one request. A short run can stand for very many, so a damaged run must be refused before
it takes all memory."""
LONGEST_LINE = 64 << 20
"""The limit for a line of a trace, in bytes."""
_HASH_BYTES = 32  # as long as real prefix hashes, so that keys cost as much as in a real engine
_IDS_END = 1 << 8 * _HASH_BYTES
_LATEST = 1e15
"""The limit for a time in a trace, in milliseconds."""
_LONGEST_TEXT = 256
_ONCE = "an id names a whole prefix, so it occurs once in a request"
_GZIP_MAGIC = b"\x1f\x8b"

_ARRIVALS_PER_SECOND = 0.5
_TOKENS_PER_SECOND = 40.0
_THINK_SECONDS = 25.0  # median
_QUESTION_TOKENS = 600.0  # median; it is long because people paste documents
_ANSWER_TOKENS = 300.0  # median
_PROMPT_BLOCKS = (2, 12)
_EVEN_LAYERS = 4  # enough to test that slots are gathered from several regions


class Runs(Sequence[int]):
    """Block ids, stored as runs of consecutive numbers. It is equal to any sequence of the same ids."""

    __slots__ = ("_length", "ranges")

    def __init__(self, ranges: Iterable[range]) -> None:
        self.ranges = tuple(ranges)
        self._length = sum(map(len, self.ranges))

    @classmethod
    def of(cls, ids: Iterable[int]) -> Runs:
        ranges: list[range] = []
        for one in ids:
            if ranges and ranges[-1].stop == one:
                ranges[-1] = range(ranges[-1].start, one + 1)
            else:
                ranges.append(range(one, one + 1))
        return cls(ranges)

    def to_json(self) -> list[int]:
        """Return first id, count, first id, count and so on."""
        return [number for one in self.ranges for number in (one.start, len(one))]

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.ranges)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Runs({list(self.ranges)})"


class Numbers:
    """Numbers ids in the order of their first use, so that they form long runs. It remembers a bounded number of ids.
    Later ones are shifted above all numbers, so that equal ids stay equal and no id meets a number. Ids must be below
    2^52."""

    MOST = 1 << 22
    _MOVED = 1 << 52

    def __init__(self) -> None:
        self._number_of: dict[int, int] = {}

    def of(self, ids: Iterable[int]) -> Runs:
        return Runs.of(map(self._of, ids))

    def _of(self, one: int) -> int:
        number = self._number_of.get(one)
        if number is not None:
            return number
        if len(self._number_of) >= self.MOST:
            return self._MOVED + one
        return self._number_of.setdefault(one, len(self._number_of))


def ending_of_trace(stop: str | None) -> Ending:
    """Return how a request has ended, as the control plane wants it. It knows the ends of texts by their last tokens,
    so each `stop` of a trace is turned into a pair of tokens, unless it is a status of the control plane."""
    if stop in STATUSES:
        return Ending(stop)
    return NO_ENDING if stop is None else Ending("stop", (zlib.crc32(stop.encode()), 0))


class TraceRequest(NamedTuple):
    """One request.

    `timestamp` is when it was sent, in milliseconds. `input_length` and `output_length` are tokens. `looked_up` is the
    range of `hash_ids` that it has looked up, in a recorded trace: the GPU had the blocks before it, and computed those
    after it. None means that it looked up all of them. `end` is when its answer was complete, in milliseconds. If the
    trace does not say it, `end` is None, and the request ends when it starts. `context` names the conversation or the
    agent whose previous request this one continues. `stop` says how the answer ended, such as `tool_use` or `end_turn`.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: Sequence[int]
    looked_up: tuple[int, int] | None = None
    end: float | None = None
    context: str | None = None
    stop: str | None = None

    def keys(self) -> list[BlockKey]:
        """Return the keys of its blocks, in order."""
        return [key_of(hash_id) for hash_id in self.hash_ids]

    def to_line(self) -> str:
        """Return the request as a line of a trace, without the newline, and with its ids as runs."""
        ids = self.hash_ids if isinstance(self.hash_ids, Runs) else Runs.of(self.hash_ids)
        line = {name: value for name, value in self._asdict().items() if value is not None and name != "hash_ids"}
        return json.dumps({**line, "runs": ids.to_json()}, separators=(",", ":"))

    @property
    def asked(self) -> tuple[int, int]:
        """The range of its blocks that it looks up: the first one, and the one after the last."""
        return self.looked_up or (0, len(self.hash_ids))

    @property
    def ended(self) -> float:
        """When the request ended, in milliseconds."""
        return self.timestamp if self.end is None else self.end


def key_of(hash_id: int) -> BlockKey:
    """Return the key of the block with this id."""
    return make_key(0, hash_id.to_bytes(_HASH_BYTES, "big"))


class Event(NamedTuple):
    """The admission or the end of request `number`, at a time of the trace in milliseconds."""

    at: float
    number: int
    is_end: bool


def events(requests: Iterable[TraceRequest]) -> Iterator[Event]:
    """Yield the admission and the end of each request, in order of time. Requests are admitted in the order of the
    trace. If both happen at the same time, ends come before admissions."""
    running: list[tuple[float, int]] = []
    for number, request in enumerate(requests):
        while running and running[0][0] <= request.timestamp:
            yield Event(*heappop(running), is_end=True)
        yield Event(request.timestamp, number, is_end=False)
        heappush(running, (request.ended, number))
    while running:
        yield Event(*heappop(running), is_end=True)


def read_trace(path: str, *, limit: int | None = None) -> list[TraceRequest]:
    """Read the trace at `path`, or from standard input for `-`. Returns all requests or the first `limit`, sorted by
    their start, because a recording is sorted by their ends.

    Empty lines are skipped. Raises `InvalidRequestError`, which names the file, the line and the problem. A trace
    without requests is an error, too.
    """
    with closing(read_lines(path, longest=LONGEST_LINE)) as lines:
        requests = list(islice(parse_trace(lines, "<stdin>" if path == "-" else path), limit))
    if not requests:
        raise InvalidRequestError(f"{path} holds no requests")
    return sorted(requests, key=lambda request: request.timestamp)


def read_lines(path: str, *, longest: int = LONGEST_LINE) -> Generator[bytes]:
    """Yield the lines of the file at `path`, or of standard input for `-`. The first bytes show whether it is
    compressed with gzip, so its name does not matter. Raises `InvalidRequestError` if it cannot be read."""
    try:
        with ExitStack() as stack:
            source: io.BufferedReader[Any]
            if path == "-":
                source = io.BufferedReader(cast("io.RawIOBase", sys.stdin.buffer))
                stack.callback(source.detach)  # otherwise closing the reader would close standard input
            else:
                source = stack.enter_context(open(path, "rb"))
            is_compressed = source.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
            stream = stack.enter_context(gzip.open(source)) if is_compressed else source
            while line := stream.readline(longest + 1):
                if len(line) > longest:
                    raise InvalidRequestError(f"{path} has a line of more than {longest:,} bytes; is it a trace?")
                yield line
    except (OSError, EOFError, zlib.error) as error:  # gzip raises all of these
        raise InvalidRequestError(f"cannot read the trace {path}: {_words(error)}") from error


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def parse_trace(lines: Iterable[bytes], name: str) -> Iterator[TraceRequest]:
    """Yield the requests in `lines`. Errors call the source `name`."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield parse_line(line, f"{name}:{number}")


def parse_line(line: bytes, name: str) -> TraceRequest:
    """Return the request in a line. Raises `InvalidRequestError`, which calls the line `name`."""
    try:
        return _parse_request(json.loads(line))
    except (ValueError, RecursionError) as error:  # errors of JSON and of UTF-8, too
        raise InvalidRequestError(f"{name}: {error}") from error


def _parse_request(value: Any) -> TraceRequest:
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} found; a request is a JSON object")
    ids = "runs" if "runs" in value else "hash_ids"
    if missing := [field for field in ("timestamp", "input_length", "output_length", ids) if field not in value]:
        raise ValueError(f"{', '.join(missing)} missing")
    if "runs" in value and "hash_ids" in value:
        raise ValueError("runs and hash_ids found; a request has one of them")
    timestamp = check_milliseconds("timestamp", value["timestamp"])
    for field in ("input_length", "output_length"):
        check_tokens(field, value[field])
    hash_ids = _unpacked(value["runs"]) if "runs" in value else _checked_ids(value["hash_ids"])
    looked_up, end = value.get("looked_up"), value.get("end")
    return TraceRequest(
        timestamp,
        value["input_length"],
        value["output_length"],
        hash_ids,
        None if looked_up is None else _positions(looked_up, len(hash_ids)),
        None if end is None else check_milliseconds("end", end, least=timestamp),
        check_text("context", value.get("context")),
        check_text("stop", value.get("stop")),
    )


def check_milliseconds(field: str, value: Any, *, least: float = 0) -> float:
    """Return the value if it is a time in milliseconds. Raises `ValueError`, as the functions below do."""
    if type(value) not in (int, float) or not least <= value <= _LATEST:
        raise ValueError(f"{field} is {value!r}; allowed: milliseconds, {least:g} or more")
    return value  # type: ignore[no-any-return]


def check_tokens(field: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{field} is {value!r}; allowed: a whole number of tokens, 0 or more")
    return value


def check_text(field: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        raise ValueError(f"{field} is {value!r:.80}; allowed: text of at most {_LONGEST_TEXT} characters")
    value.encode()  # raises for half a surrogate pair, which is no text
    return value


def _positions(value: Any, count: int) -> tuple[int, int]:
    match value:
        case [int(first), int(stop)] if 0 <= first <= stop <= count:
            return first, stop
    raise ValueError(f"looked_up is {value!r}; allowed: two whole numbers, growing, from 0 to {count}")


def _checked_ids(ids: Any) -> Sequence[int]:
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids is {ids!r}; allowed: a list of whole numbers")
    for one in ids:
        if type(one) is not int or not 0 <= one < _IDS_END:
            raise ValueError(f"hash_ids holds {one!r}; allowed: whole numbers from 0 to below 2^{8 * _HASH_BYTES}")
    if len(set(ids)) < len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise ValueError(f"hash_ids holds {twice} twice; {_ONCE}")
    packed = Runs.of(ids)
    return packed if 2 * len(packed.ranges) <= len(ids) else tuple(ids)


def _unpacked(runs: Any) -> Runs:
    if not isinstance(runs, list) or len(runs) % 2:
        raise ValueError(
            f"runs is {runs!r:.80}; allowed: a list of whole numbers: first id, count, first id, count ..."
        )
    ranges = []
    left = MOST_BLOCKS
    for first, length in zip(runs[::2], runs[1::2], strict=True):
        if type(first) is not int or type(length) is not int or first < 0 or length < 1 or first + length > _IDS_END:
            raise ValueError(
                f"runs holds {first!r}, {length!r}; allowed: an id from 0 to below 2^{8 * _HASH_BYTES} and a count of "
                "1 or more"
            )
        left -= length
        if left < 0:
            raise ValueError(f"runs has more than {MOST_BLOCKS:,} blocks; no request is that long")
        ranges.append(range(first, first + length))
    for one, other in pairwise(sorted(ranges, key=lambda one: one.start)):
        if other.start < one.stop:
            raise ValueError(
                f"runs holds {other.start} twice; an id names a whole prefix, so it occurs once in a request"
            )
    return Runs(ranges)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a trace is replayed.

    `concurrency` is the limit for requests in flight. Requests that have been stored and only generate do not count.
    With 1, each request is stored before the next one looks up. `rate` is the number of requests that start per second.
    `time_scale` starts them by their timestamps, this many times as fast as recorded. With neither they start as fast
    as possible. `drain_seconds` is how long a stop waits for requests in flight. `prefill_rate` is the number of tokens
    per second that the model computes, one request at a time. None means that computing takes no time.
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
        """Return the seconds in which the model computes this many blocks."""
        return blocks * BLOCK_TOKENS / self.prefill_rate if self.prefill_rate is not None else 0.0

    def due(self, index: int, request: TraceRequest, first: TraceRequest) -> float:
        """Return when `request`, which has the number `index` in the trace, is due, in seconds after the replay's
        start."""
        if self.rate is not None:
            return index / self.rate
        if self.time_scale is not None:
            return (request.timestamp - first.timestamp) / 1000 / self.time_scale
        return 0.0

    def due_end(self, ended: float, first: TraceRequest) -> float | None:
        """Return when a request is due to end, in seconds after the replay's start, given its end in the trace. None if
        the replay does not follow the trace's pace."""
        return None if self.time_scale is None else (ended - first.timestamp) / 1000 / self.time_scale


@dataclass(frozen=True, slots=True)
class TraceShape:
    """`sessions` conversations of `turns` turns on average, which share `shared_prompts` system prompts. With 0 they
    share none."""

    sessions: int = 100
    turns: int = 5
    shared_prompts: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for key, least in (("sessions", 1), ("turns", 1), ("shared_prompts", 0)):
            if getattr(self, key) < least:
                raise ConfigError(key, getattr(self, key), f"a whole number, {least} or more")


def generate_trace(shape: TraceShape, *, limit: int | None = None) -> list[TraceRequest]:
    """Generate all conversations, and return their requests in order of time, or the first `limit` of them. The same
    shape always gives the same trace."""
    if limit is not None and limit < 1:
        raise ConfigError("requests", limit, "a whole number, 1 or more")
    rng = random.Random(shape.seed)
    ids = count()
    prompts = [[next(ids) for _ in range(rng.randint(*_PROMPT_BLOCKS))] for _ in range(shape.shared_prompts)]
    requests: list[TraceRequest] = []
    started = 0.0
    for session in range(shape.sessions):
        started += rng.expovariate(_ARRIVALS_PER_SECOND)
        turns = _conversation(rng, ids, _pick(rng, prompts), shape.turns, started)
        requests.extend(turn._replace(context=str(session)) for turn in turns)
    return sorted(requests, key=lambda request: request.timestamp)[:limit]


def _pick(rng: random.Random, prompts: list[list[int]]) -> list[int]:
    """Pick a system prompt, and return its whole blocks. Prompt number n is picked with a frequency of 1/n."""
    if not prompts:
        return []
    return rng.choices(prompts, weights=[1 / rank for rank in range(1, len(prompts) + 1)])[0]


def _conversation(
    rng: random.Random, ids: Iterator[int], prompt: list[int], turns: int, started: float
) -> Iterator[TraceRequest]:
    """Yield the turns of a conversation. A turn's prompt is the text of all earlier turns, and a question. Whole blocks
    keep their ids from turn to turn. A last block that is not full gets a new id, because the next turn fills it with
    other tokens."""
    seconds = started
    tokens, whole = len(prompt) * BLOCK_TOKENS, [*prompt]
    for _ in range(rng.randint(1, 2 * turns - 1)):
        tokens += _tokens(rng, _QUESTION_TOKENS)
        whole.extend(next(ids) for _ in range(tokens // BLOCK_TOKENS - len(whole)))
        partial = (next(ids),) if tokens % BLOCK_TOKENS else ()
        answer = _tokens(rng, _ANSWER_TOKENS)
        end = seconds + answer / _TOKENS_PER_SECOND
        blocks = Runs.of((*whole, *partial))
        yield TraceRequest(round(seconds * 1000), tokens, answer, blocks, end=round(end * 1000), stop="end_turn")
        tokens += answer
        seconds = end + _THINK_SECONDS * rng.lognormvariate(0.0, 0.7)


def _tokens(rng: random.Random, median: float) -> int:
    return 1 + int(median * rng.lognormvariate(0.0, 0.8))


@dataclass(frozen=True, slots=True)
class Shape:
    """The KV cache of one rank: `layers` regions with a page of `page_bytes` bytes for each block."""

    name: str
    layers: int
    page_bytes: int

    @property
    def slot_bytes(self) -> int:
        """The size of one block over all layers, in bytes."""
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
    """Return the shape of this name. Raises `ConfigError` if `SHAPES` has none."""
    if name not in SHAPES:
        raise ConfigError("--shape", name, " or ".join(SHAPES))
    return SHAPES[name]


def even_shape(slot_bytes: int) -> Shape:
    """Return a shape with `slot_bytes` per block, in four equal layers, or in one if they cannot be divided by four."""
    layers = _EVEN_LAYERS if slot_bytes % _EVEN_LAYERS == 0 else 1
    return Shape("even", layers, slot_bytes // layers)
