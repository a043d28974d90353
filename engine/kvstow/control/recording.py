"""A recording of the requests of a pool: when they ended, what they looked up, and hashes in place of their keys.

The hashes are keyed, and their key is never written anywhere and ends with the recording. So they say which blocks are
equal within one recording, and nothing else: nobody finds a block by them, guesses a prompt, or compares two
recordings.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from threading import Lock
from typing import Literal, NamedTuple

from kvstow.errors import InvalidRequestError

MOST_WAITING = 1 << 18
"""Keys that a recording holds until they are read, requests counted as one more each: about 30 MiB."""
MOST_SECONDS = 86_400.0
MOST_BYTES = 4 << 30
_TAKEN = 1 << 13
"""Keys that are hashed in one call: some ms."""
_ID_BITS = 52  # any JSON reader keeps so many
_SECRET_BYTES = 32

End = Literal["time", "size", "slow", "stopped"]


class _Waiting(NamedTuple):
    time: float
    tag: int
    parts: list[tuple[bytes, ...]]
    looked_up: tuple[int, int]

    @property
    def size(self) -> int:
        """In what `MOST_WAITING` counts."""
        return sum(map(len, self.parts)) + 1


class Taken(NamedTuple):
    """Lines of a trace. `end`: why nothing follows them; None while more may."""

    lines: bytes
    end: End | None


class Recording:
    """Takes the requests of a pool from any thread, and never waits; one reader takes lines of a trace. It ends after
    so many seconds, or bytes that were read; or because its reader is too slow, so that it holds a bounded amount of
    memory.
    """

    def __init__(
        self,
        began: float,
        *,
        seconds: float,
        max_bytes: int,
        block_tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `InvalidRequestError` for limits beyond those of this module. `began`: on the pool's clock, from which
        the times of requests count. `block_tokens`: None counts a block as one token."""
        if not 0 < seconds <= MOST_SECONDS:
            raise InvalidRequestError(f"seconds is {seconds:g}; allowed: more than 0, at most {MOST_SECONDS:g}")
        if not 0 < max_bytes <= MOST_BYTES:
            raise InvalidRequestError(f"max_bytes is {max_bytes}; allowed: 1 to {MOST_BYTES}")
        self._lock = Lock()
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._began, self._bytes_left = began, max_bytes
        self._clock, self._ends = clock, clock() + seconds
        self._block_tokens = block_tokens or 1
        self._waiting: deque[_Waiting] = deque()
        self._behind: dict[int, list[tuple[int, tuple[bytes, ...]]]] = {}
        """By session: parts of a chain whose beginning is still to come, the end first, with their places in it."""
        self._held = 0
        self._end: End | None = None
        self.requests = self.blocks = 0
        """That were read."""

    @property
    def is_over(self) -> bool:
        """Nothing is added any more."""
        with self._lock:
            return self._has_ended()

    def add(
        self, session: int, keys: Sequence[bytes], tag: int, start: int, looked_up: tuple[int, int] | None, now: float
    ) -> None:
        """A request of a session has used these keys; see `Session.use`. `tag`: of the namespace. O(keys), some
        nanoseconds each."""
        with self._lock:
            if self._has_ended():
                return
            if self._held + len(keys) + 1 > MOST_WAITING:
                self._finish("slow")
                return
            self._held += len(keys) + 1
            self._behind.setdefault(session, []).append((start, tuple(keys)))
            if not start:
                behind = self._behind.pop(session)
                waiting = _Waiting(now, tag, _joined(behind), looked_up or (0, len(keys)))
                self._held += waiting.size - sum(len(part) + 1 for _, part in behind)
                self._waiting.append(waiting)

    def take(self) -> Taken:
        """What has come since the last call, or a part of it. For the reader; hashes without the lock."""
        requests: list[_Waiting] = []
        num_keys = 0
        with self._lock:
            self._has_ended()
            while self._waiting and num_keys < _TAKEN:
                requests.append(self._waiting.popleft())
                num_keys += requests[-1].size
                self._held -= requests[-1].size
        lines = []
        for request in requests:
            line = self._line(request)
            if len(line) > self._bytes_left:
                with self._lock:
                    self._waiting.clear()
                    self._finish("size")
                break
            self._bytes_left -= len(line)
            lines.append(line)
        with self._lock:
            return Taken(b"".join(lines), None if self._waiting else self._end)

    def stop(self) -> None:
        """Its reader has gone, or reads what is left too late. Idempotent."""
        with self._lock:
            if self._end is not None and self._waiting:
                self._end = "slow"
            self._finish("stopped")
            self._waiting.clear()

    def _has_ended(self) -> bool:
        """The caller holds the lock, as for the method below."""
        if self._end is None and self._clock() >= self._ends:
            self._finish("time")
        return self._end is not None

    def _finish(self, end: End) -> None:
        self._end = self._end or end
        self._behind.clear()

    def _line(self, request: _Waiting) -> bytes:
        ids = [self._id(request.tag, key) for part in request.parts for key in part]
        ids = list(dict.fromkeys(ids))  # a client may repeat a key; a trace does not
        first, stop = (min(position, len(ids)) for position in request.looked_up)
        self.requests += 1
        self.blocks += stop - first
        line = {
            "timestamp": round(1000 * (request.time - self._began)),
            "input_length": stop * self._block_tokens,
            "output_length": (len(ids) - stop) * self._block_tokens,
            "hash_ids": ids,
            "looked_up": [first, stop],
        }
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"

    def _id(self, tag: int, key: bytes) -> int:
        digest = blake2b(tag.to_bytes(8, "big") + key, digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest, "big") >> (64 - _ID_BITS)


def _joined(behind: list[tuple[int, tuple[bytes, ...]]]) -> list[tuple[bytes, ...]]:
    """The parts of a chain from its beginning on, without those of another chain whose beginning never came."""
    found: list[tuple[bytes, ...]] = []
    expected = 0
    for start, part in reversed(behind):
        if start == expected:
            found.append(part)
            expected += len(part)
    return found
