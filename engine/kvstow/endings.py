"""The state of the request that used a block last: whether it is running, or how it has ended.

How a request ends tells when its blocks are used next. The pool learns this for each state, so nothing here says which
ending is good or bad. A client that says when it comes back only chooses among the states. A client that says what is
not true makes its own state worthless, and gains nothing.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from typing import Final, Literal, NamedTuple, get_args

Status = Literal["other", "stop", "length", "abort", "interrupted"]
"""How a request has ended. `interrupted`: the engine stopped computing it, and the client did not ask for that: it was
preempted, the engine was reset, or its session has ended. `other` also stands for blocks that were stored without a
request."""
STATUSES: Final[tuple[Status, ...]] = get_args(Status)

MOST_PAIRS = 8
"""How many pairs of last tokens have a state each."""
_RESUME_TIMES = 39
"""How many states there are for the time after which a client comes back."""
_FIRST_TIME, _TIME_FACTOR = 0.5, 1.4
"""The longest time of the first of these states, in seconds, and how many times longer each next one is."""
_PAIR = struct.Struct("<IQQ")
"""How often a pair occurred, and its two tokens."""
PAIRS_BYTES = MOST_PAIRS * _PAIR.size
"""The length of `Endings.dump`, in bytes."""

OTHER = 0
"""The state of the status `other`. Each status has its place in `STATUSES` as its state."""
PAIRS = range(len(STATUSES), len(STATUSES) + MOST_PAIRS)
"""The states of requests that stopped with one of the most frequent pairs of last tokens."""
RESUMES = range(PAIRS.stop, PAIRS.stop + _RESUME_TIMES)
"""The states of requests whose client has said when it comes back, or for how long it wants the blocks kept, by that
time."""
RELEASED = RESUMES.stop
"""The state of requests whose client has said that no other follows."""
FETCHED = RELEASED + 1
"""The state of blocks that came from a store below the pool, and that only the request which fetched them has used."""
RUNNING = FETCHED + 1
"""The state of requests that run. It has to be the last one."""
NUM_STATES = RUNNING + 1

_BOUNDS = [_FIRST_TIME * _TIME_FACTOR**number for number in range(_RESUME_TIMES - 1)]
RESUME_TIMES = (_FIRST_TIME / 2, *[bound * _TIME_FACTOR**0.5 for bound in _BOUNDS])
"""The time that stands for each state of `RESUMES`, in seconds."""


class Ending(NamedTuple):
    """How a request has ended. `tokens`: its last two output tokens, if it has stopped by itself and they are known.
    `resume_in`: in how many seconds its client's next request comes, or for how many seconds its client wants the
    blocks kept; None if unknown. `release`: whether no other request follows."""

    status: Status = "other"
    tokens: tuple[int, int] | None = None
    resume_in: float | None = None
    release: bool = False


NO_ENDING = Ending()


class Endings:
    """Finds the state that follows from an ending. Used under the pool's lock.

    The last two tokens of an output distinguish a tool call from an answer in every family of models. What a pair means
    is learned: the pairs that occur most often have a state each. Their frequencies are estimated by Space-Saving, and
    halved now and then.
    """

    _MOST_COUNTED = 64
    _HALVE_AT = 4096

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], int] = {}
        self._states: dict[tuple[int, int], int] = {}
        self._total = 0

    def __len__(self) -> int:
        """How many pairs are counted."""
        return len(self._counts)

    def dump(self) -> bytes:
        """Which pair each state of `PAIRS` stands for, and how often it occurred: `PAIRS_BYTES` bytes for `load`."""
        found = {state: (self._counts[pair], *pair) for pair, state in self._states.items()}
        return b"".join(_PAIR.pack(*found.get(state, (0, 0, 0))) for state in PAIRS)

    def load(self, data: bytes) -> None:
        """Take up what an earlier life of the pool has learned, before any ending."""
        for state, (count, *pair) in zip(PAIRS, _PAIR.iter_unpack(data), strict=True):
            if count:
                self._counts[pair[0], pair[1]], self._states[pair[0], pair[1]] = count, state

    def state_of(self, ending: Ending) -> tuple[int, bool]:
        """The state of an ending, and whether that state has just got another meaning."""
        if ending.release:
            return RELEASED, False
        if ending.resume_in is not None:
            return RESUMES[bisect_right(_BOUNDS, ending.resume_in)], False
        if ending.status == "stop" and ending.tokens is not None:
            return self._state_of_pair(ending.tokens)
        return STATUSES.index(ending.status), False

    def _state_of_pair(self, pair: tuple[int, int]) -> tuple[int, bool]:
        counts, states = self._counts, self._states
        if pair not in counts and len(counts) >= self._MOST_COUNTED:
            rarest = min((one for one in counts if one not in states), key=counts.__getitem__)
            counts[pair] = counts.pop(rarest)
        counts[pair] = count = counts.get(pair, 0) + 1
        self._total += 1
        if self._total >= self._HALVE_AT:
            self._total //= 2
            for one in counts:
                counts[one] //= 2
        if pair in states:
            return states[pair], False
        if len(states) < MOST_PAIRS:
            states[pair] = min(set(PAIRS).difference(states.values()))
            return states[pair], True
        rarest = min(states, key=counts.__getitem__)
        if count > 2 * counts[rarest] + 16:
            states[pair] = states.pop(rarest)
            return states[pair], True
        return STATUSES.index("stop"), False
