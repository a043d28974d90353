"""The pool's own choice of `k`: by what shadows with each of the choices have hit lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

from kvstow.control.shadows import Part, Request, Shadows
from kvstow.control.uses import hash_keys

CHOICES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_WINDOW_POOLS = 8
_WINDOW_REQUESTS = 300
_PIECES = 16
"""Of a window. It moves piece by piece."""
_LEAD = 0.005


class Change(NamedTuple):
    """The pool has chosen another `k`. The ratios of hits are those of the shadows, over the same requests."""

    before: float
    k: float
    ratio_before: float
    ratio: float
    requests: int
    blocks: int

    def __str__(self) -> str:
        return (
            f"the order of eviction has changed from k = {self.before:g} to k = {self.k:g}: over the last "
            f"{self.requests:,} requests ({self.blocks:,} blocks), {self.ratio:.1%} of the blocks would have hit "
            f"instead of {self.ratio_before:.1%}"
        )


class Chooser:
    """Chooses `k` by what the shadows of the choices have hit lately: over the last 300 requests, or as many as have
    looked up eight times the blocks of a full pool, if those are more. Not locked.

    Another one is taken if it leads by half a point, once for each pool of blocks at most.
    """

    def __init__(self, num_slots: int, k: float = 0.0) -> None:
        self.k = k
        self.num_slots = num_slots
        self._pieces: deque[tuple[int, int, list[float]]] = deque(maxlen=_PIECES)
        self._begin_piece()
        self._since_change = 0

    def _begin_piece(self) -> None:
        self._requests = self._blocks = 0
        self._hits = [0.0] * len(CHOICES)

    def add(self, request: Request) -> Change | None:
        """A request has ended; the shadows of the choices come first in its hits."""
        self._requests += 1
        self._blocks += request.queried
        self._since_change += request.queried
        self._hits = [have + more for have, more in zip(self._hits, request.hits.tolist(), strict=False)]
        if self._requests * _PIECES < _WINDOW_REQUESTS or self._blocks * _PIECES < _WINDOW_POOLS * self.num_slots:
            return None
        self._pieces.append((self._requests, self._blocks, self._hits))
        self._begin_piece()
        return self._decide()

    def _decide(self) -> Change | None:
        blocks = sum(piece[1] for piece in self._pieces)
        if len(self._pieces) < _PIECES // 2 or self._since_change < self.num_slots:
            return None
        ratios = [sum(column) / blocks for column in zip(*(piece[2] for piece in self._pieces), strict=True)]
        before = ratios[CHOICES.index(self.k)]
        best = max(range(len(CHOICES)), key=lambda number: ratios[number])
        if ratios[best] < before + _LEAD:
            return None
        change = Change(self.k, CHOICES[best], before, ratios[best], sum(piece[0] for piece in self._pieces), blocks)
        self.k = CHOICES[best]
        self._since_change = 0
        return change


class Choice:
    """Follows the requests of a pool. Any thread; it has a lock of its own, so that no call of the pool waits for it.

    `Request`s reach it in parts, see `Session.use`: the caller keeps the later `Part`s of a chain between its calls.
    """

    def __init__(self, num_slots: int) -> None:
        self._lock = Lock()
        self._shadows = Shadows([(k, 1.0) for k in CHOICES], num_slots)
        self._chooser = Chooser(num_slots)

    def resize(self, num_slots: int) -> None:
        """The pool has so many slots. O(1) if it had before."""
        with self._lock:
            if num_slots != self._shadows.num_slots:
                self._shadows.resize(num_slots)
                self._chooser.num_slots = num_slots

    def choose(self, keys: Sequence[bytes], tag: int, start: int) -> Part:
        """What is followed of a part of a chain, in the namespace with the number `tag`. `start`: how many keys of the
        chain come before these."""
        hashes = hash_keys(keys, tag)
        with self._lock:
            return self._shadows.choose(hashes, start)

    def use(self, parts: Sequence[Part], looked_up: range, now: float) -> Change | None:
        """A request has ended that has used the chain of these parts, and has looked up these positions of it."""
        with self._lock:
            return self._chooser.add(self._shadows.use(parts, looked_up, now))
