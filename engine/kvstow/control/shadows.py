"""What the pool would hold with other orders of eviction, and of other sizes, simulated with a sample of its keys.

Each request is told once, when it ends: its chain of keys, and which of them were looked up. A shadow is a simulated
pool that has only keys. Every use admits the keys to all shadows, and a shadow evicts the oldest key of a class, as the
pool does (`EvictionOrder`). So what a shadow holds of a class is always an end of the list of that class, which all
shadows share, and a shadow is little more than the place in each list where its own part begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import inf, nextafter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow.control.uses import CLASSES, LOG_USES, MOST_USES, NUM_CLASSES, Hashes, smoothed

MOST_FOLLOWED = 16_384
"""Keys that are followed."""
POOLS_FOLLOWED = 8
"""How many times the keys of a full pool are followed: its own, those of larger shadows, and evicted ones."""
_GONE = -1
_SLACK = 0.01
"""By how much of its size a shadow of a sample may be too large, and is too small after it has evicted: it evicts
several keys at once."""

Floats = npt.NDArray[np.float64]


class Part(NamedTuple):
    """The followed keys of a part of a chain, as hashes, and their positions in the chain."""

    hashes: list[int]
    positions: list[int]


class Request(NamedTuple):
    """What a request has hit in each shadow. `queried`: how many blocks it looked up. `blocks`: how many of these the
    sample stands for; the share of them that hits is less random than that of all blocks."""

    queried: int
    blocks: float
    hits: Floats


def _without_repeats(hashes: list[int], positions: list[int]) -> tuple[list[int], list[int]]:
    first: dict[int, int] = {}
    for each, position in zip(hashes, positions, strict=True):
        first.setdefault(each, position)
    return list(first), list(first.values())


class _List:
    """The followed keys of one class in the order of their last use. An entry is outdated if its key was used since."""

    __slots__ = ("keys", "orders")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.orders: list[int] = []


class _Shadow:
    """A simulated pool. `starts[c]`: where its part of the list of class `c` begins. Sizes are in slots of the pool."""

    __slots__ = ("age", "k", "num_slots", "row", "starts")

    def __init__(self, row: int, k: float, num_slots: float) -> None:
        self.row, self.k, self.num_slots = row, k, num_slots
        self.age: float | None = None
        self.starts = [0] * NUM_CLASSES


class Shadows:
    """Not locked. A request costs O(its followed keys x shadows), in steps of numpy as far as none is evicted."""

    def __init__(self, variants: Sequence[tuple[float, float]], num_slots: int, most: int = MOST_FOLLOWED) -> None:
        """`variants`: of each shadow the `k`, and how many times as large as the pool of `num_slots` it is."""
        self.most = most
        self.num_slots = num_slots
        self._times = [times for _, times in variants]
        self._shadows = [_Shadow(row, k, times * num_slots) for row, (k, times) in enumerate(variants)]
        self._sizes = np.zeros(len(variants))
        self._most = np.array([shadow.num_slots for shadow in self._shadows])
        self._cuts = np.zeros((len(variants), NUM_CLASSES), np.int64)
        """By shadow and class: the order of use from which on keys of the class are in the shadow."""
        self._set_rate(self._best_rate())
        self._hot = HotKeys()
        self._lists = [_List() for _ in range(NUM_CLASSES)]
        self._recent: deque[tuple[int, int]] = deque()
        """Keys with their order of use, oldest first; outdated entries as in `_List`."""
        self._key_of: dict[int, int] = {}
        """The number of each followed hash: its place in the lists below."""
        self._free: list[int] = []
        self._hash_of: list[int] = []
        self._order_of: list[int] = []
        """When the key was used last, as a number that grows by one with each use of a key."""
        self._used_at: list[float] = []
        self._uses: list[int] = []
        self._weight_of: list[float] = []
        self._last_order = 0

    def __len__(self) -> int:
        """Keys that are followed."""
        return len(self._key_of)

    # -- requests -------------------------------------------------------------------------------------------

    def choose(self, hashes: Hashes, start: int = 0) -> Part:
        """The keys to follow, of a chain or a part of it. `start`: how many keys of the chain come before these."""
        if self.rate == 1.0:
            return Part(hashes.tolist(), list(range(start, start + len(hashes))))
        positions = (hashes < np.uint64(self._threshold)).nonzero()[0].tolist()
        if not start:
            leading = self._hot.lead(hashes)
            for key in self._hot.take_changed():
                self._reweigh(key)
            positions = [*range(leading), *[each for each in positions if each >= leading]]
        return Part(hashes[positions].tolist(), [start + each for each in positions])

    def use(self, parts: Sequence[Part], looked_up: range, now: float) -> Request:
        """A request has ended that has used the chain of these parts, the first one first. `looked_up`: the positions
        that it looked up."""
        hashes = [each for part in parts for each in part.hashes]
        positions = [each for part in parts for each in part.positions]
        if len(set(hashes)) < len(hashes):  # a chain repeats none, but a client may; a key is followed once
            hashes, positions = _without_repeats(hashes, positions)
        if not hashes:
            return Request(len(looked_up), 0.0, np.zeros(len(self._shadows)))
        keys = [self._key_of.get(each, _GONE) for each in hashes]
        weights = self._weights(hashes, keys)
        orders = np.array([_GONE if key == _GONE else self._order_of[key] for key in keys])
        classes = [0 if key == _GONE else CLASSES[self._uses[key]] for key in keys]
        is_there = orders >= self._cuts[:, classes]
        first, last = bisect_left(positions, looked_up.start), bisect_left(positions, looked_up.stop)
        asked = np.concatenate(([0.0], np.cumsum(weights[first:last])))
        found = is_there[:, first:last]
        leading = np.where(found.all(axis=1), last - first, found.argmin(axis=1) if last > first else 0)
        self._replace(hashes, keys, weights, is_there @ weights, now)
        return Request(len(looked_up), float(asked[-1]), asked[leading])

    def _weights(self, hashes: list[int], keys: list[int]) -> Floats:
        """How many slots each key stands for."""
        if self.rate == 1.0:
            return np.ones(len(keys))
        hot = self._hot.keys
        return np.array([1.0 if each in hot else self._weight for each in hashes])

    def _replace(self, hashes: list[int], keys: list[int], weights: Floats, held: Floats, now: float) -> None:
        """Admit the keys everywhere. `held`: the slots that each shadow had for them; while others make room, its own
        blocks stay."""
        for key in keys:
            if key != _GONE:
                self._order_of[key] = _GONE
        total = float(weights.sum())
        self._sizes -= held
        slack = 0.0 if self.rate == 1.0 else _SLACK
        for row in (self._sizes + total > self._most * (1.0 + slack)).nonzero()[0].tolist():
            self._evict(self._shadows[row], self._most[row] * (1.0 - slack) - total, now)
        self._admit(hashes, keys, weights.tolist(), now)
        self._sizes += total
        for row in (self._sizes > self._most * (1.0 + slack)).nonzero()[0].tolist():  # the chain is larger than that
            self._evict(self._shadows[row], self._most[row], now)
        self._forget()

    def _admit(self, hashes: list[int], keys: list[int], weights: list[float], now: float) -> None:
        least = 0
        order = self._last_order
        touched: list[tuple[int, int]] = []
        for each, key, weight in zip(reversed(hashes), reversed(keys), reversed(weights), strict=True):
            order += 1
            if key == _GONE:
                key = self._add(each)
            self._uses[key] = least = max(least, min(self._uses[key] + 1, MOST_USES))
            self._order_of[key], self._used_at[key], self._weight_of[key] = order, now, weight
            entries = self._lists[CLASSES[least]]
            entries.keys.append(key)
            entries.orders.append(order)
            touched.append((key, order))
        self._last_order = order
        self._recent.extend(touched)

    def _add(self, hash_: int) -> int:
        if self._free:
            key = self._free.pop()
            self._hash_of[key], self._uses[key] = hash_, 0
        else:
            key = len(self._hash_of)
            self._hash_of.append(hash_)
            self._uses.append(0)
            self._order_of.append(_GONE)
            self._used_at.append(0.0)
            self._weight_of.append(0.0)
        self._key_of[hash_] = key
        return key

    # -- eviction -------------------------------------------------------------------------------------------

    def _evict(self, shadow: _Shadow, most: float, now: float) -> None:
        """Evict from a shadow until it has at most so many slots."""
        row, size = shadow.row, float(self._sizes[shadow.row])
        used_at, order_of, weight_of = self._used_at, self._order_of, self._weight_of
        scale = shadow.k * (shadow.age or 0.0)
        heads = [head for number in range(NUM_CLASSES) if (head := self._head(shadow, number, scale)) is not None]
        ages, count = 0.0, 0.0
        while size > most and heads:
            least = min(heads)
            heads.remove(least)
            number = least[1]
            next_worth, next_class = min(heads, default=(inf, 0))
            until = next_worth - scale * LOG_USES[number]
            if number > next_class:
                until = nextafter(until, -inf)
            entries, at, is_first = self._lists[number], shadow.starts[number], True
            keys, orders = entries.keys, entries.orders
            while at < len(keys):
                key = keys[at]
                if order_of[key] == orders[at]:
                    if not is_first and (used_at[key] > until or size <= most):
                        break
                    is_first = False
                    weight = weight_of[key]
                    size -= weight
                    ages += weight * (now - used_at[key])
                    count += weight
                at += 1
            shadow.starts[number] = at
            self._cuts[row, number] = orders[at] if at < len(keys) else self._last_order + 1
            head = self._head(shadow, number, scale)
            if head is not None:
                heads.append(head)
        self._sizes[row] = size
        if count:
            shadow.age = smoothed(shadow.age, ages / count, count, shadow.num_slots)

    def _head(self, shadow: _Shadow, number: int, scale: float) -> tuple[float, int] | None:
        """The worth of the oldest key of a class in a shadow."""
        entries, at = self._lists[number], shadow.starts[number]
        keys, orders, order_of = entries.keys, entries.orders, self._order_of
        while at < len(keys) and order_of[keys[at]] != orders[at]:
            at += 1
        shadow.starts[number] = at
        if at == len(keys):
            return None
        return self._used_at[keys[at]] + scale * LOG_USES[number], number

    # -- what is followed -----------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Follow no more keys than allowed, and drop what is outdated from the lists."""
        recent, order_of = self._recent, self._order_of
        while len(self._key_of) > self.most and recent:
            key, order = recent.popleft()
            if order_of[key] == order:
                self._drop(key)
        if len(recent) > 2 * len(self._key_of) + 64:
            self._recent = deque((key, order) for key, order in recent if order_of[key] == order)
        for number, entries in enumerate(self._lists):
            if len(entries.keys) > 2 * len(self._key_of) + 64 or len(entries.keys) > 2 * self.most:
                self._compact(number)

    def _drop(self, key: int) -> None:
        self._sizes[self._holders(key)] -= self._weight_of[key]
        self._order_of[key] = _GONE
        del self._key_of[self._hash_of[key]]
        self._free.append(key)

    def _compact(self, number: int) -> None:
        entries, order_of = self._lists[number], self._order_of
        is_live = [order_of[key] == order for key, order in zip(entries.keys, entries.orders, strict=True)]
        before = list(accumulate(is_live, initial=0))
        for shadow in self._shadows:
            shadow.starts[number] = before[shadow.starts[number]]
        entries.keys = [key for key, live in zip(entries.keys, is_live, strict=True) if live]
        entries.orders = [order for order, live in zip(entries.orders, is_live, strict=True) if live]

    def _reweigh(self, hash_: int) -> None:
        """A key has become hot, or is no longer."""
        key = self._key_of.get(hash_)
        if key is None:
            return
        if hash_ not in self._hot.keys and hash_ >= self._threshold:
            self._drop(key)
            return
        weight = 1.0 if hash_ in self._hot.keys else self._weight
        self._sizes[self._holders(key)] += weight - self._weight_of[key]
        self._weight_of[key] = weight

    def _holders(self, key: int) -> npt.NDArray[np.bool_]:
        """Which shadows have a key."""
        return self._order_of[key] >= self._cuts[:, CLASSES[self._uses[key]]]

    # -- size -----------------------------------------------------------------------------------------------

    def _best_rate(self) -> float:
        return min(1.0, self.most / (POOLS_FOLLOWED * max(1, self.num_slots)))

    def _set_rate(self, rate: float) -> None:
        self.rate = rate
        self._weight = 1.0 / rate
        self._threshold = min((1 << 64) - 1, int(rate * (1 << 64)))

    def resize(self, num_slots: int) -> None:
        """The pool has another size. O(1) unless the rate changes."""
        self.num_slots = num_slots
        for shadow, times in zip(self._shadows, self._times, strict=True):
            shadow.num_slots = self._most[shadow.row] = times * num_slots
        if not self.rate / 2 < self._best_rate() <= self.rate * 2:
            self._resample(self._best_rate())

    def _resample(self, rate: float) -> None:
        """Follow another share of the keys. O(followed keys x shadows), with a few steps of numpy for all of them."""
        self._set_rate(rate)
        hot, order_of = self._hot.keys, self._order_of
        for hash_, key in list(self._key_of.items()):
            if hash_ in hot:
                self._weight_of[key] = 1.0
            elif hash_ < self._threshold:
                self._weight_of[key] = self._weight
            else:
                order_of[key] = _GONE
                del self._key_of[hash_]
                self._free.append(key)
        keys = list(self._key_of.values())
        orders = np.array([order_of[key] for key in keys], np.int64)
        classes = np.array([CLASSES[self._uses[key]] for key in keys], np.intp)
        weights = np.array([self._weight_of[key] for key in keys])
        self._sizes[:] = [(orders >= cuts[classes]) @ weights for cuts in self._cuts]

    def set_k(self, row: int, k: float) -> None:
        self._shadows[row].k = k

    def check(self) -> None:
        """Raises `AssertionError` if a size is not that of the keys. O(keys x shadows): for tests."""
        sizes = np.zeros(len(self._shadows))
        for key in self._key_of.values():
            sizes[self._holders(key)] += self._weight_of[key]
        assert np.allclose(sizes, self._sizes), (sizes, self._sizes)


_HOT_SHARE = 0.01
_HOT_REQUESTS = 100
"""Requests after which keys may be hot."""
_COUNTED = 4096


class HotKeys:
    """The keys that are in more than 1 % of the requests. Whatever has a key has all keys before it, so these are the
    first keys of chains, and each is looked for behind another one. Not locked; bounded."""

    def __init__(self) -> None:
        self.keys: set[int] = set()
        self._counts: dict[int, int] = {}
        self._total = 0
        self._changed: list[int] = []

    def lead(self, hashes: Hashes) -> int:
        """Count a request. Returns how many of its leading keys are hot."""
        self._total += 1
        leading = 0
        for each in hashes:
            key = int(each)
            self._counts[key] = self._counts.get(key, 0) + 1
            if key not in self.keys:
                if self._total < _HOT_REQUESTS or self._counts[key] <= _HOT_SHARE * self._total:
                    break
                self.keys.add(key)
                self._changed.append(key)
            leading += 1
        if len(self._counts) > _COUNTED:
            self._age()
        return leading

    def _age(self) -> None:
        self._total //= 2
        self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}
        for key in list(self.keys):
            if self._counts.get(key, 0) < _HOT_SHARE / 2 * self._total:
                self.keys.discard(key)
                self._changed.append(key)

    def take_changed(self) -> list[int]:
        changed, self._changed = self._changed, []
        return changed
