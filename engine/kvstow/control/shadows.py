"""What the pool would hold with other orders of eviction, and of other sizes, simulated with a sample of its keys.

Each request is told once, when it ends: its chain of keys, and which of them were looked up. A shadow is a simulated
pool that has only keys. Every use admits the keys to all shadows. With `k` = 0, a shadow has the keys that were used
last, as many as there is room for. Other shadows evict the oldest key of a class, as the pool does (`EvictionOrder`).
So what they hold of a class is always an end of the list of that class, which all of them share, and such a shadow is
little more than the place in each list where its own part begins.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import accumulate
from math import floor, inf, nextafter
from operator import sub
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow.control.uses import CLASSES, LOG_USES, MOST_USES, NUM_CLASSES, Hashes, first_and_last_words, smoothed

MOST_FOLLOWED = 16_384
"""Keys that are followed."""
POOLS_FOLLOWED = 8
"""How many times the keys of a full pool are followed: its own, those of larger shadows, and evicted ones."""
_FORGOTTEN = 64
"""The part of the followed keys that is forgotten at once."""
_GONE = -1
_SLACK = 0.025
"""By how much of its size a shadow of a sample may be too large, and is too small after it has evicted: it evicts
several keys at once."""
_NEVER = 1 << 64
"""The level of a key that is not followed unless it is hot. Lower ones are those of `level_of`."""
_MIX_HEAD, _MIX_ALL, _MIX_BYTE = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 151
_LOW_BITS = 56
_RANKS = bytes(each * _MIX_BYTE & 255 for each in range(256))
_UP_TO = tuple(bytes(rank <= most for rank in _RANKS) for most in range(256))
"""By the upper byte of a level: which last bytes a key may have whose level is at most so much."""
_THIN_RATE = 1 / 64
_STRETCHES = ((0, 1, 64), (64, 4, 256), (256, 16, 1 << 62))
"""From where to where in a chain every fourth or sixteenth position is looked at, at a rate up to `_THIN_RATE`, and
four or sixteen times the share of these keys is followed. A key has the same position in every chain that has it."""

Floats = npt.NDArray[np.float64]
Hits = dict[int, float]
"""Blocks, by the set of the shadows that have hit them: the bits of their numbers."""


def spread(hits: Mapping[int, float], num_shadows: int) -> Floats:
    """The blocks that each shadow has hit."""
    found = np.zeros(num_shadows)
    for holders, blocks in hits.items():
        found[[row for row in range(num_shadows) if holders >> row & 1]] += blocks
    return found


class Part(NamedTuple):
    """The followed keys of a part of a chain: their names, what says whether they are followed, their positions in the
    chain, and how many blocks each stands for; 0.0: as many as the sample says."""

    names: list[int]
    levels: list[int]
    positions: list[int]
    weights: list[float]


class Request(NamedTuple):
    """What a request has hit in each shadow. `queried`: how many blocks it looked up. `blocks`: how many of these the
    sample stands for; the share of them that hits is less random than that of all blocks. `seen_hits`: the leading
    blocks that any request has used before, of `seen_blocks`, which another sample stands for."""

    queried: int
    blocks: float
    hits: Hits
    seen_blocks: float = 0.0
    seen_hits: float = 0.0


class _Key:
    """A key that is followed."""

    __slots__ = ("is_hot", "level", "name", "order", "position", "used_at", "uses", "weight")

    def __init__(self, name: int, level: int, position: int, weight: float) -> None:
        self.name, self.level, self.position, self.weight = name, level, position, weight
        self.order = _GONE
        """When it was used last: numbers that grow with the time, the class and the key, in this order."""
        self.used_at = 0.0
        self.uses = 0
        self.is_hot = False
        """Which of the lists of recent keys has it."""


_CLASS_BITS, _KEY_BITS = 5, 24


class _List:
    """The followed keys of one class in the order of their last use. An entry is outdated if its key was used since."""

    __slots__ = ("keys", "orders")

    def __init__(self) -> None:
        self.keys: list[_Key] = []
        self.orders: list[int] = []


class _Shadow:
    """A simulated pool where uses count. `starts[c]`: where its part of the list of class `c` begins, with the order
    `cuts[c]`. Sizes are in slots of the pool."""

    __slots__ = ("age", "bit", "cuts", "k", "most", "size", "starts")

    def __init__(self, row: int, k: float, most: float) -> None:
        self.bit, self.k, self.most = 1 << row, k, most
        self.age: float | None = None
        self.size = 0.0
        self.starts = [0] * NUM_CLASSES
        self.cuts = [0] * NUM_CLASSES


class Shadows:
    """Not locked. A request costs O(its followed keys x shadows)."""

    def __init__(self, variants: Sequence[tuple[float, float]], num_slots: int, most: int = MOST_FOLLOWED) -> None:
        """`variants`: of each shadow the `k`, and how many times as large as the pool of `num_slots` it is."""
        self.most = most
        self.num_slots = num_slots
        self._times = [times for _, times in variants]
        self._all = (1 << len(variants)) - 1
        self._counting = {row: _Shadow(row, k, times * num_slots) for row, (k, times) in enumerate(variants) if k}
        """The shadows where uses count."""
        self._counting_bits = sum(shadow.bit for shadow in self._counting.values())
        self._hot = HotKeys()
        self._key_of: dict[int, _Key] = {}
        """By the name."""
        self._recent = array("q")
        """The orders of all keys that are not hot, ascending."""
        self._recent_hot = array("q")
        self._hot_blocks = 0.0
        """What the hot ones stand for."""
        self._lists = [_List() for _ in range(NUM_CLASSES)]
        self._num_entries = 0
        self._holders_of: list[tuple[list[int], list[int]] | None] = [None] * NUM_CLASSES
        """By class: the cuts of the shadows where uses count, in ascending order, and the shadows that hold a key
        before the first one, after it, and so on. None if they have changed."""
        self._missed: Hits = {}
        """What was admitted and is not in the sizes yet, by the shadows that had it, and its sum."""
        self._num_missed = 0.0
        self._room = 0.0
        """What may be admitted before a shadow has to evict."""
        self._now, self._tick, self._number = -inf, 0, 0
        self._seen = Seen(most // 4)
        self._set_rate(self._best_rate())

    def __len__(self) -> int:
        """Keys that are followed."""
        return len(self._key_of)

    # -- requests -------------------------------------------------------------------------------------------

    def choose(self, keys: Sequence[bytes], tag: int = 0, start: int = 0) -> Part:
        """The keys to follow, of a chain or a part of it, in the namespace with the number `tag`. `start`: how many
        keys of the chain come before these."""
        if not keys:
            return Part([], [], [], [])
        if self.rate <= _THIN_RATE:
            positions, levels = self._choose_few(keys, start)
        else:
            found = _levels(keys)
            places = (found <= np.uint64(self._threshold)).nonzero()[0]
            positions, levels = places.tolist(), found[places].tolist()
        weights = [0.0] * len(positions)
        if not start and self.rate < 1.0:
            hot = self._hot.lead(keys, tag)
            if self._hot.changed:
                self._reweigh(self._hot.take_changed())
            if hot:
                behind = bisect_right(positions, hot[-1])
                positions[:behind] = hot
                levels[:behind] = [_NEVER] * len(hot)
                weights[:behind] = [*map(sub, hot[1:], hot), 1.0]
        names = [hash((tag, keys[at])) for at in positions]
        return Part(names, levels, [start + at for at in positions] if start else positions, weights)

    def _choose_few(self, keys: Sequence[bytes], start: int) -> tuple[list[int], list[int]]:
        """Positions and levels. Most keys are ruled out by their last byte, without a step of Python for each."""
        positions, levels = list[int](), list[int]()
        for low, step, high in _STRETCHES:
            first = max(0, low - start)
            first += (step // 2 - start - first) % step
            some = keys[first : max(0, high - start) : step]
            if not some:
                continue
            threshold = self._threshold * step
            candidates = _last_bytes(some).translate(_UP_TO[threshold >> _LOW_BITS])
            at = candidates.find(1)
            while at >= 0:
                level = level_of(some[at])
                if level <= threshold:
                    positions.append(first + at * step)
                    levels.append(level // step)
                at = candidates.find(1, at + 1)
        return positions, levels

    def use(self, parts: Sequence[Part], looked_up: range, now: float) -> Request:
        """A request has ended that has used the chain of these parts, the first one first. `looked_up`: the positions
        that it looked up."""
        if now > self._now:
            self._now, self._tick, self._number = now, self._tick + 1, 0
        weight, key_of, threshold = 1.0 / self.rate, self._key_of, int(self._threshold)
        first, stop = looked_up.start, looked_up.stop
        hits: Hits = {}
        chain: dict[int, _Key] = {}
        hot_names = set[int]()
        total, blocks, leading = 0.0, 0.0, self._all
        for part in parts:
            for name, level, position, hot_weight in zip(*part, strict=True):
                if name in chain:  # a chain repeats none, but a client may; a key is followed once
                    continue
                if not hot_weight and level > threshold:  # the rate has changed since it was chosen
                    continue
                own = hot_weight or weight
                key = key_of.get(name)
                if key is None:
                    key, holders = _Key(name, level, position, own), 0
                else:
                    holders = self._holders(key)
                    if key.weight != own:
                        self._weigh(key, own)
                chain[name] = key
                if hot_weight:
                    hot_names.add(name)
                total += own
                if holders & self._counting_bits != self._counting_bits:
                    self._missed[holders] = self._missed.get(holders, 0.0) + own
                    self._num_missed += own
                if first <= position < stop:
                    blocks += own
                    leading &= holders
                    if leading:
                        hits[leading] = hits.get(leading, 0.0) + own
        if chain:
            self._admit(chain, hot_names, total, now)
        return Request(len(looked_up), blocks, hits, *self._seen.use(parts, looked_up))

    def _holders(self, key: _Key) -> int:
        """Which shadows have a key."""
        order, number = key.order, CLASSES[key.uses]
        younger = (len(self._recent) - bisect_right(self._recent, order)) / self.rate
        if self._recent_hot:
            hot = self._recent_hot
            younger += (len(hot) - bisect_right(hot, order)) * self._hot_blocks / len(hot)
        found = self._lru_holders[bisect_right(self._lru_sizes, younger + key.weight / 2)]
        known = self._holders_of[number]
        if known is None:
            cuts = sorted((shadow.cuts[number], shadow.bit) for shadow in self._counting.values())
            known = [cut for cut, _ in cuts], list(accumulate((bit for _, bit in cuts), initial=0))
            self._holders_of[number] = known
        return found | known[1][bisect_right(known[0], order)]

    def _admit(self, chain: Mapping[int, _Key], hot: Set[int], total: float, now: float) -> None:
        """Admit the keys of a chain everywhere. While a shadow makes room, those that it has stay."""
        recent, lists = self._recent, self._lists
        for key in chain.values():
            if key.order != _GONE:
                self._detach(key)
                key.order = _GONE
        if self._num_missed > self._room:
            self._make_room(now)
        least, tick, number = 0, self._tick << (_CLASS_BITS + _KEY_BITS), self._number
        for key in reversed(list(chain.values())):
            number += 1
            key.uses = least = max(least, min(key.uses + 1, MOST_USES))
            key.order = order = tick + (CLASSES[least] << _KEY_BITS) + number
            key.used_at = now
            entries = lists[CLASSES[least]]
            entries.keys.append(key)
            entries.orders.append(order)
            key.is_hot = key.name in hot
            if key.is_hot or (recent and order < recent[-1]):
                self._attach(key)
            else:
                recent.append(order)
        self._number = number
        self._num_entries += len(chain)
        self._key_of.update(chain)
        if total > self._least:  # the chain is larger than a shadow
            self._make_room(now)
        self._forget()

    def _attach(self, key: _Key) -> None:
        """Among those that were used recently, by its order."""
        insort(self._recent_hot if key.is_hot else self._recent, key.order)
        self._hot_blocks += key.weight * key.is_hot

    def _detach(self, key: _Key) -> None:
        recent = self._recent_hot if key.is_hot else self._recent
        del recent[bisect_left(recent, key.order)]
        self._hot_blocks -= key.weight * key.is_hot

    # -- eviction -------------------------------------------------------------------------------------------

    def _make_room(self, now: float) -> None:
        """Evict from the shadows that have become too large."""
        slack = 0.0 if self.rate == 1.0 else _SLACK
        missed = self._missed.items()
        self._room = inf
        for shadow in self._counting.values():
            bit = shadow.bit
            shadow.size += sum([blocks for holders, blocks in missed if not holders & bit])
            if shadow.size > shadow.most * (1.0 + slack):
                self._evict(shadow, shadow.most * (1.0 - slack), now)
            self._room = min(self._room, shadow.most * (1.0 + slack) - shadow.size)
        self._missed, self._num_missed = {}, 0.0

    def _evict(self, shadow: _Shadow, most: float, now: float) -> None:
        """Evict from a shadow until it has at most so many slots."""
        size, scale = shadow.size, shadow.k * (shadow.age or 0.0)
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
                if key.order == orders[at]:
                    used_at = key.used_at
                    if not is_first and (used_at > until or size <= most):
                        break
                    is_first = False
                    weight = key.weight
                    size -= weight
                    ages += weight * (now - used_at)
                    count += weight
                at += 1
            shadow.starts[number] = at
            shadow.cuts[number] = orders[at] if at < len(keys) else self._next_order(number)
            self._holders_of[number] = None
            head = self._head(shadow, number, scale)
            if head is not None:
                heads.append(head)
        shadow.size = size
        if count:
            shadow.age = smoothed(shadow.age, ages / count, count, shadow.most)

    def _next_order(self, number: int) -> int:
        """What the keys of a class that are used from now on have, or more, and no key has yet."""
        return (self._tick << (_CLASS_BITS + _KEY_BITS)) + (number << _KEY_BITS) + self._number + 1

    def _head(self, shadow: _Shadow, number: int, scale: float) -> tuple[float, int] | None:
        """The worth of the oldest key of a class in a shadow."""
        entries, at = self._lists[number], shadow.starts[number]
        keys, orders = entries.keys, entries.orders
        while at < len(keys) and keys[at].order != orders[at]:
            at += 1
        shadow.starts[number] = at
        if at == len(keys):
            return None
        return keys[at].used_at + scale * LOG_USES[number], number

    # -- what is followed -----------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Follow no more keys than allowed, and drop what is outdated from the lists."""
        if len(self._key_of) > self.most:
            count = min(len(self._recent), len(self._key_of) - self.most + self.most // _FORGOTTEN)
            newest = self._recent[count - 1] if count else _GONE
            for entries in self._lists:
                for key in entries.keys[: bisect_right(entries.orders, newest)]:
                    if _GONE < key.order <= newest and not key.is_hot:
                        self._weigh(key, 0.0)
                        self._remove(key)
            del self._recent[:count]
        if self._num_entries > 2 * len(self._key_of) + 1024:
            for number, entries in enumerate(self._lists):
                self._compact(number, entries)
            self._num_entries = len(self._key_of)

    def _drop(self, key: _Key) -> None:
        self._weigh(key, 0.0)
        self._detach(key)
        self._remove(key)

    def _remove(self, key: _Key) -> None:
        """Its order is not in `_recent` any more, or is about to be removed there."""
        del self._key_of[key.name]
        key.order = _GONE

    def _weigh(self, key: _Key, weight: float) -> None:
        """A followed key stands for so many slots from now on."""
        holders = self._holders(key) & self._counting_bits
        if holders:
            for shadow in self._counting.values():
                if holders & shadow.bit:
                    shadow.size += weight - key.weight
                    self._room = min(self._room, shadow.most - shadow.size)
        self._hot_blocks += (weight - key.weight) * key.is_hot
        key.weight = weight

    def _compact(self, number: int, entries: _List) -> None:
        is_live = [key.order == order for key, order in zip(entries.keys, entries.orders, strict=True)]
        before = list(accumulate(is_live, initial=0))
        for shadow in self._counting.values():
            shadow.starts[number] = before[shadow.starts[number]]
        entries.keys = [key for key, live in zip(entries.keys, is_live, strict=True) if live]
        entries.orders = [key.order for key in entries.keys]

    def _reweigh(self, names: Iterable[int]) -> None:
        """These keys have become hot, which their next use says, or are no longer."""
        for name in names:
            key = self._key_of.get(name)
            if key is None or name in self._hot.names:
                continue
            if self._is_followed(key):
                self._weigh(key, 1.0 / self.rate)
                self._detach(key)
                key.is_hot = False
                self._attach(key)
            else:
                self._drop(key)

    def _is_followed(self, key: _Key) -> bool:
        """Whether `choose` would choose a key that is not hot."""
        if self.rate <= _THIN_RATE:
            step = next(step for _, step, high in _STRETCHES if key.position < high)
            if key.position % step != step // 2:
                return False
        return key.level <= self._threshold

    # -- size -----------------------------------------------------------------------------------------------

    def _best_rate(self) -> float:
        return min(1.0, (self.most - self.most // _FORGOTTEN) / (POOLS_FOLLOWED * max(1, self.num_slots)))

    def _set_rate(self, rate: float) -> None:
        self.rate = rate
        self._threshold = min(_NEVER - 1, int(rate * _NEVER))
        self._seen.limit(self._threshold)
        self._set_sizes()

    def _set_sizes(self) -> None:
        for row, shadow in self._counting.items():
            shadow.most = self._times[row] * self.num_slots
        self._least = min([shadow.most for shadow in self._counting.values()], default=inf)
        self._room = 0.0
        rows = [row for row in range(len(self._times)) if row not in self._counting]
        sizes = sorted((self._times[row] * self.num_slots, row) for row in rows)
        self._lru_sizes = [floor(size) if self.rate == 1.0 and size < inf else size for size, _ in sizes]
        """Of the shadows where uses do not count, in ascending order."""
        self._lru_holders = [sum([1 << row for _, row in sizes[at:]]) for at in range(len(sizes) + 1)]

    def resize(self, num_slots: int) -> None:
        """The pool has another size. O(1) unless the rate changes."""
        self.num_slots = num_slots
        if not self.rate / 2 < self._best_rate() <= self.rate * 2:
            self._resample(self._best_rate())
        self._set_sizes()

    def _resample(self, rate: float) -> None:
        """Follow another share of the keys. O(followed keys x shadows)."""
        self._make_room(self._now)
        self._set_rate(rate)
        sizes: Hits = {}
        kept = list[_Key]()
        for key in self._key_of.values():
            if not key.is_hot:
                if not self._is_followed(key):
                    key.order = _GONE
                    continue
                key.weight = 1.0 / rate
            holders = self._holders(key)
            sizes[holders] = sizes.get(holders, 0.0) + key.weight
            kept.append(key)
        self._key_of = {key.name: key for key in kept}
        self._recent = array("q", sorted([key.order for key in kept if not key.is_hot]))
        for shadow in self._counting.values():
            shadow.size = sum([blocks for holders, blocks in sizes.items() if holders & shadow.bit])

    def set_k(self, row: int, k: float) -> None:
        """Change the order of a shadow. Between 0 and others it becomes one of another kind."""
        self._make_room(self._now)
        if k and row not in self._counting:
            shadow = self._counting[row] = _Shadow(row, k, 0.0)
            shadow.cuts = [self._next_order(number) for number in range(NUM_CLASSES)]
            for key in sorted(self._key_of.values(), key=lambda each: each.order, reverse=True):
                if shadow.size + key.weight > self._times[row] * self.num_slots:
                    break
                shadow.size += key.weight
                shadow.cuts = [key.order] * NUM_CLASSES
            for number, (entries, cut) in enumerate(zip(self._lists, shadow.cuts, strict=True)):
                shadow.starts[number] = bisect_left(entries.orders, cut)
        elif k:
            self._counting[row].k = k
        else:
            self._counting.pop(row, None)
        self._counting_bits = sum(shadow.bit for shadow in self._counting.values())
        self._holders_of = [None] * NUM_CLASSES
        self._set_sizes()

    def check(self) -> None:
        """Raises `AssertionError` if a size is not that of the keys. O(keys x shadows): for tests."""
        missed = self._missed.items()
        holders = [(self._holders(key), key.weight) for key in self._key_of.values()]
        for shadow in self._counting.values():
            size = shadow.size + sum(blocks for those, blocks in missed if not those & shadow.bit)
            found = sum(weight for those, weight in holders if those & shadow.bit)
            assert abs(size - found) <= 1e-6 * max(1.0, found), (shadow.k, size, found)
        orders = sorted(key.order for key in self._key_of.values())
        assert orders == sorted([*self._recent, *self._recent_hot])
        hot = sum([key.weight for key in self._key_of.values() if key.is_hot])
        assert abs(hot - self._hot_blocks) <= 1e-6 * max(1.0, hot)


def level_of(key: bytes) -> int:
    """A number below 2 to the power of 64, evenly distributed over keys. Its upper byte is made of the key's last."""
    first, last = (key[:8], key[-8:]) if len(key) >= 8 else [key.rjust(8, b"\0")] * 2
    head, tail = int.from_bytes(first, "little"), int.from_bytes(last, "little")
    mixed = ((head * _MIX_HEAD ^ tail) * _MIX_ALL & _NEVER - 1) >> 8
    return _RANKS[key[-1]] << _LOW_BITS | mixed if key else mixed


def _levels(keys: Sequence[bytes]) -> Hashes:
    """`level_of` many keys of one length."""
    head, tail = first_and_last_words(keys)
    mixed: Hashes = head * np.uint64(_MIX_HEAD)
    mixed ^= tail
    mixed *= np.uint64(_MIX_ALL)
    mixed >>= np.uint64(64 - _LOW_BITS)
    mixed |= (tail >> np.uint64(_LOW_BITS)) * np.uint64(_MIX_BYTE) << np.uint64(_LOW_BITS)
    return mixed


def _last_bytes(keys: Sequence[bytes]) -> bytes:
    data, width = b"".join(keys), len(keys[0])
    if not width or len(data) != width * len(keys):  # keys of several lengths
        return bytes([key[-1] if key else 0 for key in keys])
    return data[width - 1 :: width]


class Seen:
    """Which keys have ever been used, of a sample that becomes smaller as there are more. Bounded."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._threshold = _NEVER
        self._level_of: dict[int, int] = {}
        """By the name."""

    def limit(self, threshold: int) -> None:
        """From now on, no key with a level above the threshold is followed."""
        if threshold < self._threshold:
            self._threshold = threshold
            self._level_of = {name: level for name, level in self._level_of.items() if level <= threshold}

    def use(self, parts: Iterable[Part], looked_up: range) -> tuple[float, float]:
        """A request has used these keys, and has looked some positions up. How many blocks it looked up, as the sample
        says, and how many of these in the beginning were seen before."""
        threshold, level_of = self._threshold, self._level_of
        weight = _NEVER / max(1, threshold + 1)
        first, stop = looked_up.start, looked_up.stop
        blocks, hits, is_leading = 0.0, 0.0, True
        for part in parts:
            for name, level, position, own in zip(*part, strict=True):
                if level <= threshold:
                    is_known = name in level_of
                    level_of[name] = level
                elif own:
                    is_known = True
                else:
                    continue
                if first <= position < stop:
                    blocks += own or weight
                    is_leading = is_leading and is_known
                    if is_leading:
                        hits += own or weight
        while len(level_of) > self._most:
            self.limit((self._threshold - 1) // 2)  # below 0 in the end: a client can make keys whose level is 0
            level_of = self._level_of
        return blocks, hits


_HOT_SHARE = 0.01
_HOT_REQUESTS = 100
"""Requests after which keys may be hot."""
_COUNTED = 4096


_STEPS = [0]
"""The positions at which keys are counted: all of the first eight, then four while the number doubles."""
while _STEPS[-1] < 1 << 22:
    _STEPS.append(_STEPS[-1] + max(1, 1 << _STEPS[-1].bit_length() >> 3))


class HotKeys:
    """The keys that are in more than 1 % of the requests. Whatever has a key has all keys before it, so these are the
    first keys of chains, and each is looked for behind another one. Not locked; bounded."""

    def __init__(self) -> None:
        self.names: set[int] = set()
        self.changed: list[int] = []
        self._counts: dict[int, int] = {}
        self._total = 0

    def lead(self, keys: Sequence[bytes], tag: int = 0) -> list[int]:
        """Count a request. Returns the positions of its leading keys that are hot, as far as they are counted: the keys
        between two of them are hot, too."""
        self._total += 1
        counts, hot = self._counts, list[int]()
        for position in _STEPS:
            if position >= len(keys):
                break
            name = hash((tag, keys[position]))
            counts[name] = count = counts.get(name, 0) + 1
            if name not in self.names:
                if self._total < _HOT_REQUESTS or count <= _HOT_SHARE * self._total:
                    break
                self.names.add(name)
                self.changed.append(name)
            hot.append(position)
        if len(counts) > _COUNTED:
            self._age()
        return hot

    def _age(self) -> None:
        self._total //= 2
        self._counts = {name: count // 2 for name, count in self._counts.items() if count > 1}
        for name in list(self.names):
            if self._counts.get(name, 0) < _HOT_SHARE / 2 * self._total:
                self.names.discard(name)
                self.changed.append(name)

    def take_changed(self) -> list[int]:
        changed, self.changed = self.changed, []
        return changed
