"""Compares a pool with its shadows: which `k` hits most, and what other sizes would hit."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from threading import Lock
from typing import NamedTuple

import numpy as np

from kvstow.control.shadows import Floats, Part, Request, Shadows
from kvstow.control.uses import hash_keys
from kvstow.status import Curve, CurvePoint

CHOICES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
SIZES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Of the curve, as multiples of the pool's."""
_WINDOW_POOLS = 8
_WINDOW_REQUESTS = 300
_PIECES = 16
"""Of a window. It moves piece by piece."""
_LEAD = 0.005


class _Piece:
    """Some requests together."""

    __slots__ = ("blocks", "hits", "requests", "sampled")

    def __init__(self) -> None:
        self.requests = self.blocks = 0
        self.sampled: float = 0.0
        self.hits: Floats | float = 0.0

    def add(self, request: Request) -> None:
        self.requests += 1
        self.blocks += request.queried
        self.sampled += request.blocks
        self.hits = self.hits + request.hits


class Window:
    """The hits of the last 300 requests, or of as many as have looked up eight times the blocks of a full pool, if
    those are more. Not locked."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._pieces: deque[_Piece] = deque(maxlen=_PIECES)
        self._next = _Piece()

    @property
    def requests(self) -> int:
        return sum(piece.requests for piece in self._pieces)

    @property
    def blocks(self) -> int:
        """That were looked up."""
        return sum(piece.blocks for piece in self._pieces)

    @property
    def is_meaningful(self) -> bool:
        """Whether half a window has passed since the start."""
        return len(self._pieces) >= _PIECES // 2

    def add(self, request: Request) -> bool:
        """A request has ended. Returns whether the window has moved."""
        piece = self._next
        piece.add(request)
        is_full = piece.requests * _PIECES >= _WINDOW_REQUESTS
        if not is_full or piece.blocks * _PIECES < _WINDOW_POOLS * self.num_slots:
            return False
        self._pieces.append(piece)
        self._next = _Piece()
        return True

    def ratios(self) -> Floats:
        """The share of blocks that each shadow has hit. Only where the window `is_meaningful`."""
        hits = np.sum([np.asarray(piece.hits) for piece in self._pieces], axis=0)
        found: Floats = hits / max(1.0, sum(piece.sampled for piece in self._pieces))
        return found


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
    """Chooses `k` by what the shadows of the choices have hit in the window, beginning with 0. Another one is taken if
    it leads by half a point, once for each pool of blocks at most. Not locked."""

    def __init__(self, window: Window) -> None:
        self.k = CHOICES[0]
        self._window = window
        self._since_change = 0

    def add(self, request: Request) -> Change | None:
        """A request has ended; the shadows of the choices come first in its hits."""
        self._since_change += request.queried
        window = self._window
        if not window.add(request) or not window.is_meaningful or self._since_change < window.num_slots:
            return None
        ratios = window.ratios()[: len(CHOICES)].tolist()
        before, best = ratios[CHOICES.index(self.k)], ratios.index(max(ratios))
        if ratios[best] < before + _LEAD:
            return None
        change = Change(self.k, CHOICES[best], before, ratios[best], window.requests, window.blocks)
        self.k, self._since_change = change.k, 0
        return change


class Comparison:
    """Follows the requests of a pool. Any thread; it has a lock of its own, so that no call of the pool waits for it.

    Requests reach it in parts, see `Session.use`: the caller keeps the later `Part`s of a chain between its calls.
    """

    def __init__(self, num_slots: int, k: float | None, *, has_curve: bool) -> None:
        """`k`: None if it is to be chosen. `has_curve`: also compare sizes."""
        self._lock = Lock()
        variants = [(each, 1.0) for each in CHOICES] if k is None else []
        self._lru_rows = range(len(variants), len(variants) + len(SIZES) * has_curve)
        self._own_rows = range(self._lru_rows.stop, self._lru_rows.stop + len(SIZES) * has_curve)
        own = CHOICES[0] if k is None else k
        if has_curve:
            variants += [(order, times) for order in (0.0, own) for times in SIZES] + [(0.0, inf)]
        self._shadows = Shadows(variants, num_slots)
        self._window = Window(num_slots)
        self._k = own
        self._chooser = Chooser(self._window) if k is None else None

    def resize(self, num_slots: int) -> None:
        """The pool has so many slots. O(1) if it had before."""
        with self._lock:
            if num_slots != self._shadows.num_slots:
                self._shadows.resize(num_slots)
                self._window.num_slots = num_slots

    def choose(self, keys: Sequence[bytes], tag: int, start: int) -> Part:
        """What is followed of a part of a chain, in the namespace with the number `tag`. `start`: how many keys of the
        chain come before these."""
        hashes = hash_keys(keys, tag)
        with self._lock:
            return self._shadows.choose(hashes, start)

    def use(self, parts: Sequence[Part], looked_up: range, now: float) -> Change | None:
        """A request has ended that has used the chain of these parts, and has looked up these positions of it."""
        with self._lock:
            request = self._shadows.use(parts, looked_up, now)
            if self._chooser is None:
                self._window.add(request)
                return None
            change = self._chooser.add(request)
            if change is not None:
                self._k = change.k
                for row in self._own_rows:
                    self._shadows.set_k(row, change.k)
            return change

    def curve(self) -> Curve | None:
        """None without one, and before there is evidence for it."""
        with self._lock:
            if not self._lru_rows or not self._window.is_meaningful:
                return None
            ratios, slots = self._window.ratios(), self._shadows.num_slots
            points = [
                CurvePoint(round(times * slots), float(ratios[lru]), float(ratios[own]))
                for times, lru, own in zip(SIZES, self._lru_rows, self._own_rows, strict=True)
            ]
            everything = float(ratios[self._own_rows.stop])
            return Curve(tuple(points), everything, self._k, self._window.requests, self._window.blocks)
