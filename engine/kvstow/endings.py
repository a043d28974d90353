"""The state of the request that used a block last: whether it is running, or how it has ended.

The way a request ends says something about when its blocks are used next. The pool learns for each state what it says,
so no ending is good or bad in itself. If a client announces when it comes back, the announcement only chooses one of
the states. If many announcements are false, the pool learns that blocks in this state do not come back then, so a lie
gains nothing.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from typing import Final, Literal, NamedTuple, get_args

Status = Literal["other", "stop", "length", "abort", "interrupted"]
"""How a request has ended. `interrupted`: the engine stopped computing the request although its client did not ask for
that, because the request was preempted, the engine was reset, or its session has ended. `other` also stands for blocks
that were stored without a request."""
STATUSES: Final[tuple[Status, ...]] = get_args(Status)

MOST_PAIRS = 8
"""How many pairs of last tokens have a state of their own."""
_RESUME_TIMES = 39
"""How many states there are for announced times of return."""
_FIRST_TIME, _TIME_FACTOR = 0.5, 1.4
"""The longest time that the first of these states stands for, in seconds, and the factor by which the longest time
grows from each state to the next."""
_PAIR = struct.Struct("<IQQ")
"""The form in which a pair outlives the process: how often it has occurred, and its two tokens."""
PAIRS_BYTES = MOST_PAIRS * _PAIR.size
"""The length of `Endings.dump`, in bytes."""

OTHER = 0
"""The state of the status `other`. Each status has its place in `STATUSES` as its state."""
PAIRS = range(len(STATUSES), len(STATUSES) + MOST_PAIRS)
"""The states of requests that have stopped and whose last two tokens are one of the most frequent pairs."""
RESUMES = range(PAIRS.stop, PAIRS.stop + _RESUME_TIMES)
"""The states of requests whose client has announced when it comes back, or for how long it wants the blocks kept. Each
stands for a range of times, see `RESUME_TIMES`."""
RELEASED = RESUMES.stop
"""The state of requests whose client has said that no other request will use their blocks."""
FETCHED = RELEASED + 1
"""The state of blocks that a store below the pool has, too, as far as is known."""
RUNNING = FETCHED + 1
"""The state of running requests. It has to be the last number."""
NUM_STATES = RUNNING + 1

_BOUNDS = [_FIRST_TIME * _TIME_FACTOR**number for number in range(_RESUME_TIMES - 1)]
RESUME_TIMES = (_FIRST_TIME / 2, *[bound * _TIME_FACTOR**0.5 for bound in _BOUNDS])
"""A typical time for each state of `RESUMES`, in seconds: about the middle of its range."""


class Ending(NamedTuple):
    """How a request has ended. `tokens`: its last two output tokens, or None if it did not stop by itself or they are
    unknown. `resume_in`: the seconds until the client sends the next request, or for which it wants the blocks kept;
    None if it has said neither. `release`: whether the client has said that no other request will use the blocks."""

    status: Status = "other"
    tokens: tuple[int, int] | None = None
    resume_in: float | None = None
    release: bool = False


NO_ENDING = Ending()


class Endings:
    """Finds the state that follows from an ending. Used under the pool's lock.

    The last two tokens of an output distinguish a tool call from an answer in every family of models. The pool learns
    what a pair means, so it needs to know no model: each of the pairs that occur most often has a state of its own.

    Only 64 pairs are counted, by the Space-Saving algorithm: a pair that is not counted yet takes the place and the
    count of the rarest one that has no state. So no frequent pair is missed, and a rare one may seem too frequent. All
    counts are halved every few thousand requests, so that they follow the traffic. A pair takes over the state of
    another only if it occurs more than twice as often, because what was learned of that state is then lost.
    """

    _MOST_COUNTED = 64
    """How many pairs are counted."""
    _HALVE_AT = 4096
    """The counts are halved when their sum reaches about this."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], int] = {}
        self._states: dict[tuple[int, int], int] = {}
        self._total = 0

    def __len__(self) -> int:
        """Return how many pairs are counted."""
        return len(self._counts)

    def dump(self) -> bytes:
        """Return which pair each state of `PAIRS` stands for, and how often the pair has occurred, as `PAIRS_BYTES`
        bytes for `load`."""
        found = {state: (self._counts[pair], *pair) for pair, state in self._states.items()}
        return b"".join(_PAIR.pack(*found.get(state, (0, 0, 0))) for state in PAIRS)

    def load(self, data: bytes) -> None:
        """Take up the pairs of an earlier life of the pool; see `dump`. Must be called before `state_of`."""
        for state, (count, *pair) in zip(PAIRS, _PAIR.iter_unpack(data), strict=True):
            if count:
                self._counts[pair[0], pair[1]], self._states[pair[0], pair[1]] = count, state
                self._total += count

    def state_of(self, ending: Ending) -> tuple[int, bool]:
        """Return the state that follows from an ending, and whether this state has just been given to a pair. What was
        learned of the state before has to be forgotten then."""
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
