"""What pools of other sizes would hit, simulated with a sample of the keys, in the order of the last use.

A request counts once, when it begins: with its chain of keys, and which of them it looked up. A shadow is a simulated
pool that has only keys: those that were used last, as many as there is room for. So whether it has a key follows from
how many blocks were used since the key was, and one list of keys serves all sizes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import floor, inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow.control.keyhashes import Hashes, hash_joined, join_keys

MOST_FOLLOWED = 16_384
"""Keys that are followed."""
POOLS_FOLLOWED = 8
"""How many times the keys of a full pool are followed: its own, those of larger shadows, and evicted ones."""
_FORGOTTEN = 64
"""The part of the followed keys that is forgotten at once."""
_GONE = -1
_NEVER = 1 << 64
"""The level of a key that is not followed unless it is hot."""
_THIN_RATE = 1 / 64
"""Below it, half as many keys are followed, and only at some places of a chain: there are enough of them."""
_STRETCHES = ((0, 1, 16), (16, 4, 64), (64, 16, 256), (256, 64, 1 << 20))
"""From where to where in a chain every fourth, sixteenth or 64th position is a place, in the middle of those that it
stands for. A key has the same position in every chain that has it."""
_PLACES = tuple(at for low, step, high in _STRETCHES for at in range(low + step // 2, high, step))
_SPANS = tuple(step for low, step, high in _STRETCHES for _ in range(low + step // 2, high, step))

Floats = npt.NDArray[np.float64]
Hits = dict[int, float]
"""Blocks, by the set of the shadows that have hit them: the bits of their numbers."""


def spread(hits: Mapping[int, float], num_shadows: int) -> Floats:
    """The blocks that each shadow has hit."""
    found = np.zeros(num_shadows)
    for holders, blocks in hits.items():
        found[[row for row in range(num_shadows) if holders >> row & 1]] += blocks
    return found


class SampledPart(NamedTuple):
    """The `keys` of a part of a chain that may be followed, of `length`. `start`: how many keys of the chain come
    before the part. `first`: the number of the first place whose key it has; None: it has the keys of all positions."""

    keys: Sequence[bytes]
    length: int
    tag: int
    start: int
    first: int | None = None


Followed = tuple[int, int, int, float]
"""A key: its name; what says whether it is followed; its position in the chain; how many blocks it stands for, 0.0: as
many as the sample says."""


@dataclass(slots=True)
class Tally:
    """What requests have hit in each shadow. `blocks`: how many they looked up. `sampled`: how many of these the
    sample stands for; the share of them that hits is less random than that of all blocks. `seen_hits`: the leading
    blocks that any request has used before, of `seen_blocks`, which another sample stands for."""

    requests: int = 0
    blocks: int = 0
    sampled: float = 0.0
    hits: Hits = field(default_factory=dict)
    seen_blocks: float = 0.0
    seen_hits: float = 0.0

    def add(self, other: Tally) -> None:
        self.requests += other.requests
        self.blocks += other.blocks
        self.sampled += other.sampled
        self.seen_blocks += other.seen_blocks
        self.seen_hits += other.seen_hits
        for holders, blocks in other.hits.items():
            self.hits[holders] = self.hits.get(holders, 0.0) + blocks


class _Key:
    """A key that is followed."""

    __slots__ = ("is_hot", "name", "order", "position", "weight")

    def __init__(self, name: int, position: int, weight: float) -> None:
        self.name, self.position, self.weight = name, position, weight
        self.order = _GONE
        """When it was used last: numbers that grow."""
        self.is_hot = False
        """Which of the lists of recent keys has it."""


class Shadows:
    """Not locked. A request costs O(its followed keys x log keys)."""

    def __init__(self, times: Sequence[float], num_slots: int, most: int = MOST_FOLLOWED) -> None:
        """`times`: how many times as large as the pool of `num_slots` each shadow is."""
        self.most = most
        self.num_slots = num_slots
        self._times = list(times)
        self._all = (1 << len(self._times)) - 1
        self._hot = HotKeys()
        self._key_of: dict[int, _Key] = {}
        """By the name."""
        self._key_at: dict[int, _Key] = {}
        """By the order."""
        self._recent = array("q")
        """The orders of all keys that are not hot, ascending."""
        self._recent_hot = array("q")
        self._hot_blocks = 0.0
        """What the hot ones stand for."""
        self._number = 0
        self._seen = Seen(most // 4)
        self._set_rate(self._best_rate())

    def __len__(self) -> int:
        """Keys that are followed."""
        return len(self._key_of)

    # -- requests -------------------------------------------------------------------------------------------

    def part(self, keys: Sequence[bytes], tag: int = 0, start: int = 0) -> SampledPart:
        """Those keys of a chain, or of a part of it, that may be followed, in the namespace with the number `tag`.
        `start`: how many keys of the chain come before these."""
        length, first = len(keys), None
        if self.is_thin and start:
            first = bisect_left(_PLACES, start)
            keys = [keys[at - start] for at in _PLACES[first : bisect_left(_PLACES, start + length)]]
        elif self.is_thin:
            first = 0
            keys = [*keys[:16], *keys[18:64:4], *keys[72:256:16], *keys[288 : 1 << 20 : 64]]  # _PLACES, but faster
        else:
            keys = list(keys)  # the caller's may change before they are followed
        return SampledPart(keys, length, tag, start, first)

    def choose(self, parts: Sequence[SampledPart]) -> list[list[Followed]]:
        """The keys of each part that are followed. Many parts at once cost little more than one."""
        if not parts:
            return []
        keys, _, tags, _, firsts = zip(*parts, strict=True)
        if firsts.count(None) != (0 if self.is_thin else len(parts)):  # some were made before a resize
            return [[] for _ in parts]
        counts = [len(each) for each in keys]
        ends = list(accumulate(counts))
        datas, widths = zip(*map(join_keys, keys), strict=True)
        if len(set(widths)) == len(set(tags)) == 1:
            hashes = hash_joined(b"".join(datas), widths[0], tags[0])
        else:
            hashes = np.concatenate([hash_joined(*each) for each in zip(datas, widths, tags, strict=True)])
        limits = np.uint64(self._threshold)
        if self.is_thin:
            shifts = np.array(firsts) - np.array(ends) + np.array(counts)
            limits = self._limits[np.arange(ends[-1]) + np.repeat(shifts, counts)]
        ats = (hashes <= limits).nonzero()[0]
        chosen = [list[Followed]() for _ in parts]
        number = 0
        for name, at in zip(hashes[ats].tolist(), ats.tolist(), strict=True):
            while at >= ends[number]:
                number += 1
            part = parts[number]
            at += counts[number] - ends[number]
            if part.first is None:
                chosen[number].append((name, name, part.start + at, 0.0))
            else:
                at += part.first
                chosen[number].append((name, name // _SPANS[at], _PLACES[at], 0.0))
        if self.rate < 1.0:
            self._add_hot(parts, hashes, chosen, ends)
        return chosen

    def _add_hot(
        self, parts: Sequence[SampledPart], hashes: Hashes, chosen: list[list[Followed]], ends: Sequence[int]
    ) -> None:
        """Hot keys are followed at some places of a chain, where they stand for all keys between them."""
        if self._hot.changed:  # now that all earlier requests are followed, which have made their keys hot
            self._reweigh(self._hot.take_changed())
        numbers = [number for number, part in enumerate(parts) if part.keys and not part.start]
        firsts = [ends[number] - len(parts[number].keys) for number in numbers]
        for number, first, name in zip(numbers, firsts, hashes[firsts].tolist(), strict=True):
            if not self._hot.count(name):
                continue
            names, count = [name], len(parts[number].keys)
            for place in range(1, count) if self.is_thin else _PLACES[1:]:
                if place >= count or not self._hot.count(name := int(hashes[first + place])):
                    break
                names.append(name)
            leading = [
                (name, _NEVER, position, float(span))
                for name, position, span in zip(names, _PLACES, _SPANS, strict=False)
            ]
            behind = leading[-1][2] + leading[-1][3] / 2
            chosen[number] = leading + [one for one in chosen[number] if one[2] >= behind]
        self._hot.end(len(numbers))

    def use(self, chain: Sequence[Followed], looked_up: range, tally: Tally) -> None:
        """A request has begun that uses this chain, and has looked up these positions of it. What it has hit is
        added to the tally."""
        tally.requests += 1
        tally.blocks += len(looked_up)
        if not chain:
            return
        rate, key_of, recent = self.rate, self._key_of, self._recent
        leading, hits = self._all, tally.hits
        first, stop = looked_up.start, looked_up.stop
        used, were_hot = list[_Key](), list[tuple[int, float]]()
        low = high = gone = 0
        """Of `recent`, these are keys of the chain, and so many were removed that are younger than the next one."""
        for name, _, position, hot_weight in chain:
            own = hot_weight or 1.0 / rate
            key = key_of.get(name)
            if key is None:
                key = key_of[name] = _Key(name, position, own)
                holders = 0
            elif key.order == _GONE:  # a chain repeats none, but a client may: a key is followed once
                continue
            else:
                order, at = key.order, low - 1
                if key.is_hot:
                    younger = len(recent) - bisect_right(recent, order) + gone
                else:
                    if at < 0 or recent[at] != order:
                        del recent[low:high]
                        gone += high - low
                        at = bisect_left(recent, order)
                        high = at + 1
                    low = at
                    younger = len(recent) - at - 1 + gone
                blocks = younger / rate + key.weight / 2
                if self._recent_hot:
                    blocks += self._hot_blocks_after(order)
                holders = self._holders[bisect_right(self._sizes, blocks)]
                if key.weight != own:
                    self._weigh(key, own)
                if key.is_hot:
                    were_hot.append((order, own))
                del self._key_at[key.order]
                key.order = _GONE
            key.is_hot = hot_weight > 0.0
            used.append(key)
            if first <= position < stop:
                tally.sampled += own
                leading &= holders
                if leading:
                    hits[leading] = hits.get(leading, 0.0) + own
        del recent[low:high]
        for order, weight in were_hot:
            del self._recent_hot[bisect_left(self._recent_hot, order)]
            self._hot_blocks -= weight
        self._admit(used)
        self._seen.use(chain, looked_up, tally)

    def _hot_blocks_after(self, order: int) -> float:
        hot = self._recent_hot
        return (len(hot) - bisect_right(hot, order)) * self._hot_blocks / len(hot)

    def _admit(self, chain: Sequence[_Key]) -> None:
        """Admit the keys of a chain everywhere."""
        for key in reversed(chain):
            self._number += 1
            key.order = self._number
            self._key_at[key.order] = key
            if key.is_hot:
                self._attach(key)
            else:
                self._recent.append(key.order)
        if len(self._key_of) > self._most:
            self._forget()

    def _attach(self, key: _Key) -> None:
        """Among those that were used recently, by its order."""
        insort(self._recent_hot if key.is_hot else self._recent, key.order)
        self._hot_blocks += key.weight * key.is_hot

    def _detach(self, key: _Key) -> None:
        recent = self._recent_hot if key.is_hot else self._recent
        del recent[bisect_left(recent, key.order)]
        self._hot_blocks -= key.weight * key.is_hot

    # -- what is followed -----------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Follow no more keys than allowed."""
        count = min(len(self._recent), len(self._key_of) - self._most + self._most // _FORGOTTEN)
        for order in self._recent[:count]:
            self._remove(self._key_at[order])
        del self._recent[:count]

    def _drop(self, key: _Key) -> None:
        self._detach(key)
        self._remove(key)

    def _remove(self, key: _Key) -> None:
        """Its order is not in `_recent` any more, or is about to be removed there."""
        del self._key_of[key.name], self._key_at[key.order]
        key.order = _GONE

    def _weigh(self, key: _Key, weight: float) -> None:
        """A followed key stands for so many slots from now on."""
        self._hot_blocks += (weight - key.weight) * key.is_hot
        key.weight = weight

    def _reweigh(self, names: Iterable[int]) -> None:
        """These keys have become hot, which their next use says, or are no longer."""
        for name in names:
            key = self._key_of.get(name)
            if key is None or name in self._hot.names:
                continue
            if self._level(key) <= self._threshold:
                self._weigh(key, 1.0 / self.rate)
                self._detach(key)
                key.is_hot = False
                self._attach(key)
            else:
                self._drop(key)

    def _level(self, key: _Key) -> int:
        """What says whether `choose` would choose a key that is not hot."""
        if not self.is_thin:
            return key.name
        at = bisect_left(_PLACES, key.position)
        is_place = at < len(_PLACES) and _PLACES[at] == key.position
        return key.name // _SPANS[at] if is_place else _NEVER

    # -- size -----------------------------------------------------------------------------------------------

    def _best_rate(self) -> float:
        rate = (self.most - self.most // _FORGOTTEN) / (POOLS_FOLLOWED * max(1, self.num_slots))
        return min(1.0, rate if rate > _THIN_RATE else rate / 2)

    def _set_rate(self, rate: float) -> None:
        self.rate = rate
        self._threshold = min(_NEVER - 1, int(rate * _NEVER))
        self.is_thin = rate <= _THIN_RATE
        self._most = self.most // 2 if self.is_thin else self.most
        """Only keys at some places of a chain are followed."""
        self._limits = np.array(_SPANS if self.is_thin else (), np.uint64) * np.uint64(self._threshold)
        self._seen.limit(self._threshold)
        self._set_sizes()

    def _set_sizes(self) -> None:
        sizes = sorted((times * self.num_slots, row) for row, times in enumerate(self._times))
        self._sizes = [floor(size) if self.rate == 1.0 and size < inf else size for size, _ in sizes]
        """Of the shadows, in ascending order."""
        self._holders = [sum([1 << row for _, row in sizes[at:]]) for at in range(len(sizes) + 1)]

    def resize(self, num_slots: int) -> None:
        """The pool has another size. O(1) unless the rate changes."""
        self.num_slots = num_slots
        if not self.rate / 2 < self._best_rate() <= self.rate * 2:
            self._resample(self._best_rate())
        self._set_sizes()

    def _resample(self, rate: float) -> None:
        """Follow another share of the keys. O(followed keys)."""
        self._set_rate(rate)
        kept = list[_Key]()
        for key in self._key_of.values():
            if not key.is_hot:
                if self._level(key) > self._threshold:
                    key.order = _GONE
                    continue
                key.weight = 1.0 / rate
            kept.append(key)
        self._key_of = {key.name: key for key in kept}
        self._key_at = {key.order: key for key in kept}
        self._recent = array("q", sorted([key.order for key in kept if not key.is_hot]))

    def check(self) -> None:
        """Raises `AssertionError` if the lists are not those of the keys. O(keys): for tests."""
        orders = sorted(key.order for key in self._key_of.values())
        assert orders == sorted([*self._recent, *self._recent_hot]) == sorted(self._key_at)
        hot = sum([key.weight for key in self._key_of.values() if key.is_hot])
        assert abs(hot - self._hot_blocks) <= 1e-6 * max(1.0, hot)


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

    def use(self, chain: Iterable[Followed], looked_up: range, tally: Tally) -> None:
        """A request has used these keys, and has looked some positions up. The tally gets how many blocks it looked up,
        as the sample says, and how many of these in the beginning were seen before."""
        threshold, level_of = self._threshold, self._level_of
        weight = _NEVER / max(1, threshold + 1)
        first, stop = looked_up.start, looked_up.stop
        is_leading = True
        for name, level, position, own in chain:
            if level <= threshold:
                is_known = name in level_of
                level_of[name] = level
            elif own:
                is_known = True
            else:
                continue
            if first <= position < stop:
                tally.seen_blocks += own or weight
                is_leading = is_leading and is_known
                if is_leading:
                    tally.seen_hits += own or weight
        while len(self._level_of) > self._most:
            self.limit((self._threshold - 1) // 2)  # below 0 in the end: a client can make keys whose level is 0


_HOT_SHARE = 0.01
_HOT_REQUESTS = 100
"""Requests after which keys may be hot."""
_COUNTED = 4096


class HotKeys:
    """The keys that are in more than 1 % of the requests. Whatever has a key has all keys before it, so these are the
    first keys of chains, and each is looked for behind another one. Not locked; bounded."""

    def __init__(self) -> None:
        self.names: set[int] = set()
        self.changed: list[int] = []
        self._counts: dict[int, int] = {}
        self._total = 0

    def count(self, name: int) -> bool:
        """A request has this key. Returns whether the key is hot."""
        self._counts[name] = count = self._counts.get(name, 0) + 1
        if name in self.names:
            return True
        if self._total < _HOT_REQUESTS or count <= _HOT_SHARE * self._total:
            return False
        self.names.add(name)
        self.changed.append(name)
        return True

    def end(self, requests: int) -> None:
        """All keys of these requests were counted."""
        self._total += requests
        if len(self._counts) > _COUNTED:
            self._age()

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
