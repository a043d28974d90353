"""What hints are worth to a pool: two small pools beside it, one with hints and one without.

Both are real indexes, without memory, of a sample of the pool's keys. They say how long the policy would keep blocks by
itself, what claims save, and whether the pool would do better without.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np

from kvstow.control.claims import Switch
from kvstow.control.comparison import RequestWindow
from kvstow.control.index import Index
from kvstow.control.shadows import Tally
from kvstow.control.uses import hash_keys
from kvstow.hints import Hints

MOST_SLOTS = 2048
"""Of each small pool."""
_LEAD = 0.005
_SHORTEST_PAUSE, _LONGEST_PAUSE = 8, 512
"""Moves of the window for which hints stay off. A pause is twice as long as the last one, unless hints were used for
longer than that meanwhile."""


class TrialPart(NamedTuple):
    """The sampled keys of a part of a chain, and their positions in the chain."""

    keys: list[bytes]
    positions: list[int]


class _SmallPool:
    """Its copies are done at once."""

    def __init__(self, num_slots: int, k: float, *, has_claims: bool) -> None:
        self.index = Index(k)
        self.index.make_tables(num_slots)
        self.index.set_num_slots(num_slots)
        self._namespace = self.index.namespaces.join("")
        self._free = list(range(num_slots))
        if has_claims:
            self.index.use_claims()

    def serve(self, keys: list[bytes], looked_up: slice, hints: Hints | None, now: float) -> int:
        """A request has used the chain of these keys. Returns how many leading ones of those looked up it has hit."""
        index, namespace = self.index, self._namespace
        hits = sum(map(len, namespace.keys.leading_runs(keys[looked_up])))
        slots = namespace.keys.slots_of(keys)
        held = [slot for slot in slots if slot is not None]
        missing = [key for key, slot in zip(keys, slots, strict=True) if slot is None]
        index.hold(held)
        self._store(missing, now)
        index.unhold(held)
        index.use(namespace, *namespace.keys.split(keys), now)
        if index.claims is not None:
            index.claims.note_uses(keys, now)
            if hints is not None:
                renewal = index.claims.begin(namespace, hints, keys, now)
                index.claims.extend(renewal, namespace.keys.slots_of(keys))
                index.claims.finish(renewal)
            index.claims.settle(len(keys))
        return hits

    def _store(self, keys: list[bytes], now: float) -> None:
        lack = len(keys) - len(self._free)
        if lack > 0:
            removal = self.index.evict(lack)
            self.index.uses.note_ages(removal.freed, now)
            self._free += removal.freed
        keys = keys[: len(self._free)]
        slots = sorted(self._free[len(self._free) - len(keys) :])
        del self._free[len(self._free) - len(keys) :]
        self._namespace.keys.put(keys, slots)
        self.index.admit(self._namespace, slots, now)


class Trial:
    """Any thread; it has a lock of its own. Requests reach it in parts, as they reach a `Comparison`."""

    def __init__(self, num_slots: int, k: float) -> None:
        self._lock = Lock()
        self.num_slots = num_slots
        self._threshold = np.uint64(min((1 << 64) - 1, MOST_SLOTS * (1 << 64) // max(1, num_slots)))
        size = min(num_slots, MOST_SLOTS)
        self._with = _SmallPool(size, k, has_claims=True)
        self._without = _SmallPool(size, k, has_claims=False)
        self._window = RequestWindow(num_slots)
        self._is_on = True
        self._moves = 0
        """Of the window since the last switch."""
        self._pause = _SHORTEST_PAUSE

    def sample(self, keys: Sequence[bytes], tag: int, start: int) -> TrialPart:
        """What is followed of a part of a chain; see `Comparison.choose`. Without the lock."""
        hashes = hash_keys(keys, tag)
        positions = (hashes <= self._threshold).nonzero()[0]
        data = hashes[positions].tobytes()
        return TrialPart([data[at : at + 8] for at in range(0, len(data), 8)], (positions + start).tolist())

    def use(
        self, parts: Sequence[TrialPart], looked_up: range, hints: Hints | None, tag: int, k: float, now: float
    ) -> Switch | None:
        """A request has ended that has used the chain of these parts, and has looked up these positions of it."""
        keys = [key for part in parts for key in part.keys]
        positions = [position for part in parts for position in part.positions]
        if len(set(keys)) < len(keys):
            return None
        asked = slice(*(sum(position < end for position in positions) for end in (looked_up.start, looked_up.stop)))
        if hints is not None:
            assert hints.context is not None  # see `Session.use`
            hints = Hints(hints.context + tag.to_bytes(2, "big"), hints.resume_in, hints.release)
        with self._lock:
            self._with.index.uses.k = self._without.index.uses.k = k
            found = [pool.serve(keys, asked, hints, now) for pool in (self._with, self._without)]
            claims = self._with.index.claims
            assert claims is not None
            claims.policy_age = self.policy_age
            hits = {1: float(found[0]), 2: float(found[1])}
            tally = Tally(1, len(looked_up), float(asked.stop - asked.start), hits)
            if not self._window.add(tally) or not self._window.is_meaningful:
                return None
            return self._judge()

    def _judge(self) -> Switch | None:
        """The window has moved."""
        self._moves += 1
        ratio_with, ratio_without = self._window.ratios(2).tolist()
        lead = ratio_with - ratio_without
        if self._is_on:
            if lead > -_LEAD:
                return None
            self._pause = min(2 * self._pause, _LONGEST_PAUSE) if self._moves < 2 * self._pause else _SHORTEST_PAUSE
        elif lead < _LEAD or self._moves < self._pause:
            return None
        self._is_on, self._moves = not self._is_on, 0
        return Switch(self._is_on, ratio_with, ratio_without, self._window.requests)

    @property
    def policy_age(self) -> float:
        """How long the policy would keep a block."""
        return self._without.index.uses.age or float("inf")

    def saved_ratio(self) -> tuple[float | None, int]:
        """The share of blocks that hit because of claims, of how many requests; None before there is evidence."""
        with self._lock:
            if not self._window.is_meaningful:
                return None, self._window.requests
            ratio_with, ratio_without = self._window.ratios(2).tolist()
            return ratio_with - ratio_without, self._window.requests
