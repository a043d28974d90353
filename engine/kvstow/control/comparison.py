"""Compares a pool with its shadows: which `k` hits most, and what other sizes would hit."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np

from kvstow.control.shadows import Floats, SampledPart, Shadows, Tally, spread
from kvstow.status import CurvePoint, SizeCurve

CHOICES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
SIZES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Of the curve, as multiples of the pool's."""
_WINDOW_POOLS = 8
_WINDOW_REQUESTS = 300
_PIECES = 16
"""Of a window. It moves piece by piece."""
_LEAD = 0.005
_SAME_SIZE = 0.1
_BATCH = 128
"""Requests, or keys of requests, that are followed at once. It takes a millisecond."""


class CurveEvidence(NamedTuple):
    """Requests that have ended and blocks that they have looked up, and how many of each a curve needs."""

    requests: int
    needed_requests: int
    blocks: int
    needed_blocks: int


class RequestWindow:
    """The hits of the last 300 requests, or of as many as have looked up eight times the blocks of a full pool, if
    those are more; but none of a pool whose size differed by more than a tenth. Not locked."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.piece_blocks = num_slots * _WINDOW_POOLS / _PIECES
        """As many as a piece of the window has, or more."""
        self.piece = Tally()
        """The newest requests, which are not in the window yet: see `move`."""
        self._piece_slots = num_slots
        self._pieces: deque[tuple[int, Tally]] = deque(maxlen=_PIECES)
        """With the slots that the pool had."""

    @property
    def requests(self) -> int:
        return sum(piece.requests for _, piece in self._pieces)

    @property
    def blocks(self) -> int:
        """That were looked up."""
        return sum(piece.blocks for _, piece in self._pieces)

    def evidence(self) -> CurveEvidence:
        """How much of what the window needs to be meaningful is there."""
        requests, blocks = self.requests + self.piece.requests, self.blocks + self.piece.blocks
        return CurveEvidence(requests, _WINDOW_REQUESTS // 2, blocks, self.num_slots * _WINDOW_POOLS // 2)

    @property
    def is_meaningful(self) -> bool:
        """Whether half a window has passed since the start."""
        return len(self._pieces) >= _PIECES // 2

    def resize(self, num_slots: int) -> None:
        self.num_slots, self.piece_blocks = num_slots, num_slots * _WINDOW_POOLS / _PIECES
        while self._pieces and not self._is_of_this_size(self._pieces[0][0]):
            self._pieces.popleft()
        if not self._is_of_this_size(self._piece_slots):
            self._pieces.clear()
            self.piece, self._piece_slots = Tally(), num_slots

    def _is_of_this_size(self, num_slots: int) -> bool:
        return abs(num_slots - self.num_slots) <= _SAME_SIZE * self.num_slots

    def move(self) -> Tally | None:
        """Take the newest requests into the window if there are enough of them. Returns those that were taken."""
        piece = self.piece
        if piece.requests * _PIECES < _WINDOW_REQUESTS or piece.blocks < self.piece_blocks:
            return None
        self._pieces.append((self._piece_slots, piece))
        self.piece, self._piece_slots = Tally(), self.num_slots
        return piece

    def add(self, tally: Tally) -> bool:
        """A request has ended. Returns whether the window has moved."""
        self.piece.add(tally)
        return self.move() is not None

    @property
    def sampled(self) -> float:
        """The blocks that the sample stands for. There are none if no key of the clients is ever chosen, as where all
        keys end with the same byte."""
        return sum(piece.sampled for _, piece in self._pieces)

    def ratios(self, num_shadows: int) -> Floats:
        """The share of blocks that each shadow has hit. Only where the window `is_meaningful`."""
        hits: Floats = np.sum([spread(piece.hits, num_shadows) for _, piece in self._pieces], axis=0)
        return hits / max(1.0, self.sampled)

    def seen_ratio(self) -> float:
        """The share of blocks that any request has used before. Only where the window `is_meaningful`."""
        hits = sum(piece.seen_hits for _, piece in self._pieces)
        return hits / max(1.0, sum(piece.seen_blocks for _, piece in self._pieces))


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

    def __init__(self, window: RequestWindow) -> None:
        self.k = CHOICES[0]
        self.window = window
        self._since_change = 0

    def look(self) -> Change | None:
        """Requests have been added to the window's newest; the shadows of the choices come first in their hits."""
        window = self.window
        piece = window.move()
        if piece is None:
            return None
        self._since_change += piece.blocks
        if not window.is_meaningful or self._since_change < window.num_slots:
            return None
        ratios = window.ratios(len(CHOICES)).tolist()
        before, best = ratios[CHOICES.index(self.k)], ratios.index(max(ratios))
        if ratios[best] < before + _LEAD:
            return None
        change = Change(self.k, CHOICES[best], before, ratios[best], window.requests, window.blocks)
        self.k, self._since_change = change.k, 0
        return change


class Comparison:
    """Follows the requests of a pool. Any thread; it has a lock of its own, so that no call of the pool waits for it.

    Requests reach it in parts, see `Session.use`: the caller keeps the later `SampledPart`s of a chain between its
    calls.
    """

    def __init__(self, num_slots: int, k: float | None, *, has_curve: bool) -> None:
        """`k`: None if it is to be chosen. `has_curve`: also compare sizes."""
        self._lock = Lock()
        variants = [(each, 1.0) for each in CHOICES] if k is None else []
        self._k = CHOICES[0] if k is None else k
        self._lru_rows: list[int] = []
        self._own_rows: list[int] = []
        """Of each size. That of the pool itself is among the choices."""
        if has_curve:
            self._lru_rows = self._add_sizes(variants, 0.0)
            self._own_rows = self._lru_rows if k == 0.0 else self._add_sizes(variants, self._k)
        self._shadows = Shadows(variants, num_slots)
        self.part = self._shadows.part
        self._num_shadows = len(variants)
        self._window = RequestWindow(num_slots)
        self._chooser = Chooser(self._window) if k is None else None
        self._waiting: list[tuple[Sequence[SampledPart], range, float]] = []
        """Requests that are not followed yet: several at once cost half as much."""
        self._expected = 0.0
        """How many of their keys are going to be followed."""
        self._change: Change | None = None

    @staticmethod
    def _add_sizes(variants: list[tuple[float, float]], k: float) -> list[int]:
        """The rows of the sizes with this `k`."""
        rows = []
        for times in SIZES:
            if times == 1.0 and (k, times) in variants:
                rows.append(variants.index((k, times)))
            else:
                rows.append(len(variants))
                variants.append((k, times))
        return rows

    def use(self, parts: Sequence[SampledPart], looked_up: range, now: float, num_slots: int) -> Change | None:
        """A request has ended that has used the chain of these parts, the first one first, and has looked up these
        positions of it. The pool has so many slots."""
        shadows = self._shadows
        with self._lock:
            if num_slots != shadows.num_slots:
                self._follow_waiting()
                shadows.resize(num_slots)
                self._window.resize(num_slots)
            self._waiting.append((parts, looked_up, now))
            for part in parts:
                self._expected += shadows.rate * part.length
            if self._expected >= _BATCH or len(self._waiting) >= _BATCH:
                self._follow_waiting()
            change, self._change = self._change, None
            return change

    def _follow_waiting(self) -> None:
        """Follow the requests that have ended lately."""
        waiting, self._waiting, self._expected = self._waiting, [], 0.0
        chosen = iter(self._shadows.choose([part for parts, _, _ in waiting for part in parts]))
        shadows, window = self._shadows, self._window
        for parts, looked_up, now in waiting:
            chain = next(chosen) if len(parts) == 1 else [key for _ in parts for key in next(chosen)]
            shadows.use(chain, looked_up, now, window.piece)
            if window.piece.blocks >= window.piece_blocks:
                self._end_piece()

    def _end_piece(self) -> None:
        if self._chooser is None:
            self._window.move()
        elif change := self._chooser.look():
            self._follow(change.k)
            self._change = change

    def _follow(self, k: float) -> None:
        """The sizes of the curve in another order."""
        self._k = k
        for at, times in enumerate(SIZES[: len(self._own_rows)]):
            if times == 1.0:
                self._own_rows[at] = CHOICES.index(k)
            else:
                self._shadows.set_k(self._own_rows[at], k)

    def evidence(self) -> CurveEvidence:
        with self._lock:
            self._follow_waiting()
            return self._window.evidence()

    def curve(self) -> SizeCurve | None:
        """None without one, and before there is evidence for it."""
        with self._lock:
            self._follow_waiting()
            if not self._lru_rows or not self._window.is_meaningful or not self._window.sampled:
                return None
            window, slots = self._window, self._shadows.num_slots
            ratios = window.ratios(self._num_shadows)
            points = [
                CurvePoint(round(times * slots), float(ratios[lru]), float(ratios[own]))
                for times, lru, own in zip(SIZES, self._lru_rows, self._own_rows, strict=True)
            ]
            return SizeCurve(tuple(points), window.seen_ratio(), self._k, window.requests, window.blocks)
