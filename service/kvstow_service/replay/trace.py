"""Request traces: one JSON object a line, the schema of the Mooncake traces.

`hash_ids` holds one id per block of `BLOCK_TOKENS` prompt tokens. Equal ids mean equal prompts up to and
including that block, so an id alone is the prefix hash of its block.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from kvstow.errors import InvalidRequestError
from kvstow.keys import BlockKey, make_key

BLOCK_TOKENS = 512
_HASH_BYTES = 32  # as long as the digests of a real prefix hash, so that keys cost what they will cost


class TraceRequest(NamedTuple):
    """One request. `timestamp` in milliseconds, lengths in tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def keys(self) -> list[BlockKey]:
        """The keys of the prompt's blocks, in order."""
        return [make_key(0, hash_id.to_bytes(_HASH_BYTES, "big")) for hash_id in self.hash_ids]

    def to_line(self) -> str:
        """The request as a line of a trace, without the newline."""
        return json.dumps(self._asdict())


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
    missing = [field for field in TraceRequest._fields if field not in value]
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
    return TraceRequest(timestamp, value["input_length"], value["output_length"], tuple(hash_ids))


def _check_hash_ids(hash_ids: list[Any]) -> None:
    for hash_id in hash_ids:
        if type(hash_id) is not int or not 0 <= hash_id < 1 << 8 * _HASH_BYTES:
            raise ValueError(f"hash_ids holds {hash_id!r}; allowed: whole numbers from 0 to below 2^{8 * _HASH_BYTES}")
    if len(set(hash_ids)) < len(hash_ids):
        twice = next(hash_id for hash_id in hash_ids if hash_ids.count(hash_id) > 1)
        raise ValueError(f"hash_ids holds {twice} twice; an id names a whole prefix, so it occurs once in a request")
