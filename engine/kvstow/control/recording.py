"""A recording of the requests of a pool: when they began and how they ended, what they looked up, and hashes in place
of their keys, of the names of their contexts and of their last tokens.

The hashes are keyed, and their key is never written anywhere and ends with the recording. So they only show which
blocks are equal within one recording. They cannot be used to find a block, to check a guess of a prompt, or to compare
two recordings.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from threading import Lock
from typing import Any, Literal, NamedTuple

from kvstow.endings import NO_ENDING, Ending
from kvstow.errors import InvalidRequestError

MOST_WAITING = 1 << 18
"""How many keys a recording holds until they are read, which take about 30 MiB. A request counts as one more key."""
MOST_OPEN = 1 << 20
"""How many blocks the open requests may have, which take 32 MiB. If there are more, the oldest requests are written
without an end."""
MOST_SECONDS = 86_400.0
MOST_BYTES = 4 << 30
_TAKEN = 1 << 13
"""How many keys one call hashes, which takes some milliseconds."""
_ID_BITS = 52  # any JSON reader keeps integers of this length exactly
_SECRET_BYTES = 32

End = Literal["time", "size", "slow", "stopped"]


class _Begun(NamedTuple):
    number: Hashable
    time: float
    tag: int
    keys: Sequence[bytes]
    looked_up: tuple[int, int]
    context: bytes | None

    @property
    def size(self) -> int:
        """The size in the units of `MOST_WAITING`."""
        return len(self.keys) + 1


class _Ended(NamedTuple):
    number: Hashable
    time: float
    ending: Ending

    @property
    def size(self) -> int:
        return 1


class Taken(NamedTuple):
    """Lines of a trace. `end`: why no lines follow them; None while more may follow."""

    lines: bytes
    end: End | None


class Recording:
    """Takes the requests of a pool from any thread without waiting, and gives lines of a trace to one reader. It ends
    after a given time, or when a given number of bytes was read. It also ends if its reader is too slow, so that it
    holds a bounded amount of memory.
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
        """`began`: the time on the pool's clock from which the times of requests count. `block_tokens`: the tokens of a
        block; if None, a block counts as one token. Raises `InvalidRequestError` for limits beyond those of this
        module."""
        if not 0 < seconds <= MOST_SECONDS:
            raise InvalidRequestError(f"seconds is {seconds:g}; allowed: more than 0, at most {MOST_SECONDS:g}")
        if not 0 < max_bytes <= MOST_BYTES:
            raise InvalidRequestError(f"max_bytes is {max_bytes}; allowed: 1 to {MOST_BYTES}")
        self._lock = Lock()
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._began, self._bytes_left = began, max_bytes
        self._clock, self._ends = clock, clock() + seconds
        self._block_tokens = block_tokens or 1
        self._waiting: deque[_Begun | _Ended] = deque()
        self._held = 0
        self._end: End | None = None
        self._open: dict[Hashable, dict[str, Any]] = {}
        """The lines of requests that have not ended, by number, in the order of their beginning. Only the reader uses
        them."""
        self._open_blocks = 0
        self.requests = self.blocks = 0
        """How many requests and blocks were read so far."""

    @property
    def is_over(self) -> bool:
        """Whether the recording has ended, so that no request is added any more."""
        with self._lock:
            return self._has_ended()

    def add(
        self,
        number: Hashable,
        keys: Sequence[bytes],
        tag: int,
        looked_up: tuple[int, int] | None,
        now: float,
        context: bytes | None = None,
    ) -> None:
        """Note that a request with this chain has begun; see `Session.admit`. `number`: no other request has it before
        this one ends. `tag`: the number of the namespace. `context`: the id of the context that its client has named.
        Keeps `keys`, which must not change."""
        self._add(_Begun(number, now, tag, keys, looked_up or (0, len(keys)), context))

    def end(self, number: Hashable, ending: Ending, now: float) -> None:
        """Note that the request has ended. Has no effect if it began before the recording."""
        self._add(_Ended(number, now, ending))

    def _add(self, what: _Begun | _Ended) -> None:
        with self._lock:
            if self._has_ended():
                return
            if self._held + what.size > MOST_WAITING:
                self._finish("slow")
                return
            self._held += what.size
            self._waiting.append(what)

    def take(self) -> Taken:
        """Return the lines of requests that have ended since the last call, or of some of them. Requests that still run
        when the recording ends come last, without an end. Only the reader calls it. It computes hashes without the
        lock."""
        found: list[_Begun | _Ended] = []
        num_keys = 0
        with self._lock:
            self._has_ended()
            while self._waiting and num_keys < _TAKEN:
                found.append(self._waiting.popleft())
                num_keys += found[-1].size
                self._held -= found[-1].size
            is_last = self._end is not None and not self._waiting
        lines: list[bytes] = []
        for one in found:
            if isinstance(one, _Begun):
                if one.number in self._open:  # its session has ended without ending it
                    self._write(one.number, lines)
                self._open[one.number] = line = self._line(one)
                self._open_blocks += len(line["hash_ids"])
                while self._open_blocks > MOST_OPEN:
                    self._write(next(iter(self._open)), lines)
            elif one.number in self._open:
                line = self._open[one.number]
                line["end"] = self._milliseconds(one.time)
                if (stop := self._stop(one.ending)) is not None:
                    line["stop"] = stop
                self._write(one.number, lines)
        while is_last and self._open:
            self._write(next(iter(self._open)), lines)
        with self._lock:
            return Taken(b"".join(lines), None if self._waiting else self._end)

    def _write(self, number: Hashable, lines: list[bytes]) -> None:
        """Take a request out of the open ones, and append its line. If the recording has no room for the line, it
        ends."""
        described = self._open.pop(number)
        self._open_blocks -= len(described["hash_ids"])
        line = json.dumps(described, separators=(",", ":")).encode() + b"\n"
        if len(line) > self._bytes_left:
            self._bytes_left = 0
            with self._lock:
                self._waiting.clear()
                self._held = 0
                self._finish("size")
            return
        self._bytes_left -= len(line)
        self.requests += 1
        first, stop = described["looked_up"]
        self.blocks += stop - first
        lines.append(line)

    def stop(self) -> None:
        """End the recording, because its reader has gone or is too slow, and drop what the reader has not taken.
        Idempotent."""
        with self._lock:
            if self._end is not None and self._waiting:
                self._end = "slow"
            self._finish("stopped")
            self._waiting.clear()

    def _has_ended(self) -> bool:
        """Whether the recording has ended, which it does here if its time is over. The caller holds the lock, also for
        `_finish`."""
        if self._end is None and self._clock() >= self._ends:
            self._finish("time")
        return self._end is not None

    def _finish(self, end: End) -> None:
        self._end = self._end or end

    def _line(self, request: _Begun) -> dict[str, Any]:
        # A client may repeat a key; a trace does not.
        ids = list(dict.fromkeys([self._id(request.tag, key) for key in request.keys]))
        first, stop = (min(position, len(ids)) for position in request.looked_up)
        line: dict[str, Any] = {
            "timestamp": self._milliseconds(request.time),
            "input_length": stop * self._block_tokens,
            "output_length": (len(ids) - stop) * self._block_tokens,
            "hash_ids": ids,
            "looked_up": [first, stop],
        }
        if request.context is not None:
            line["context"] = f"{self._id(request.tag, request.context):013x}"
        return line

    def _stop(self, ending: Ending) -> str | None:
        """Return how the request has ended, or None if that is unknown. A hash stands for its last two tokens, which
        would show how the answer ended."""
        if ending.tokens is not None:
            return f"{ending.status}-{self._id(0, repr(ending.tokens).encode()):013x}"
        return None if ending.status == NO_ENDING.status else ending.status

    def _milliseconds(self, time: float) -> int:
        return round(1000 * (time - self._began))

    def _id(self, tag: int, key: bytes) -> int:
        digest = blake2b(tag.to_bytes(8, "big") + key, digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest, "big") >> (64 - _ID_BITS)
