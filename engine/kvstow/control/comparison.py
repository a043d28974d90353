"""The curve of a pool: what other sizes would hit, by its shadows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np

from kvstow.control.shadows import Floats, SampledPart, Shadows, Tally, spread
from kvstow.status import CurvePoint, SizeCurve

SIZES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Of the curve, as multiples of the pool's."""
_WINDOW_POOLS = 8
_WINDOW_REQUESTS = 300
_PIECES = 16
"""Of a window. It moves piece by piece."""
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


class Comparison:
    """Follows the requests of a pool. Any thread; it has a lock of its own, so no call of the pool waits for it."""

    def __init__(self, num_slots: int) -> None:
        self._lock = Lock()
        self._shadows = Shadows(SIZES, num_slots)
        self._window = RequestWindow(num_slots)
        self._waiting: list[tuple[SampledPart, range]] = []
        """Requests that are not followed yet: several at once cost half as much."""
        self._expected = 0.0
        """How many of their keys are going to be followed."""

    def use(self, keys: Sequence[bytes], tag: int, looked_up: range, num_slots: int) -> None:
        """A request has begun that uses this chain of keys of the namespace with the number `tag`, and has looked up
        these positions of it. The pool has so many slots."""
        shadows = self._shadows
        part = shadows.part(keys, tag)
        with self._lock:
            if num_slots != shadows.num_slots:
                self._follow_waiting()
                shadows.resize(num_slots)
                self._window.resize(num_slots)
            self._waiting.append((part, looked_up))
            self._expected += shadows.rate * part.length
            if self._expected >= _BATCH or len(self._waiting) >= _BATCH:
                self._follow_waiting()

    def _follow_waiting(self) -> None:
        """Follow the requests that have begun lately."""
        waiting, self._waiting, self._expected = self._waiting, [], 0.0
        shadows, window = self._shadows, self._window
        for (_, looked_up), chain in zip(waiting, shadows.choose([part for part, _ in waiting]), strict=True):
            shadows.use(chain, looked_up, window.piece)
            if window.piece.blocks >= window.piece_blocks:
                window.move()

    def evidence(self) -> CurveEvidence:
        with self._lock:
            self._follow_waiting()
            return self._window.evidence()

    def curve(self) -> SizeCurve | None:
        """None without one, and before there is evidence for it."""
        with self._lock:
            self._follow_waiting()
            if not self._window.is_meaningful or not self._window.sampled:
                return None
            window, slots = self._window, self._shadows.num_slots
            ratios = window.ratios(len(SIZES)).tolist()
            points = [
                CurvePoint(round(times * slots), ratio, ratio) for times, ratio in zip(SIZES, ratios, strict=True)
            ]
            return SizeCurve(tuple(points), window.seen_ratio(), window.requests, window.blocks)
