"""The curve of a pool: which part of the blocks pools of an eighth to 32 times its size would have hit.

The nine sizes are simulated together. All of them use the hazards that the pool has learned, because those belong to
the traffic and not to a size. So a block has the same place in every size, and all sizes evict in the same order: a
larger size only stops earlier in it. The chains that were used lately are therefore kept once for all sizes, as runs of
neighbouring keys. Each run has nine numbers, which say how many of its keys each size has. As every size evicts the end
of a run first, such a number is enough to say which keys these are. A request takes its chain run by run, so it costs
what a few runs cost and not what a thousand blocks cost. Of very large pools, only a sample of the keys is followed.

The scheduler only queues its requests. `Curve.follow` follows them, on the thread that ticks the pool.

A size that is not full has evicted nothing. What it hits can only grow, so its point of the curve is a lower bound.
When the pool's own size becomes full, a new window begins, so that what was hit while it filled does not count.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import inf, nextafter
from threading import Lock
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvstow.control.chains import SAME_USE, Running
from kvstow.control.hazards import NUM_BINS, UPPER, Hazards, bin_of, used_again
from kvstow.endings import RUNNING
from kvstow.stats import LookupStats
from kvstow.status import CurveEvidence, CurvePoint, SizeCurve

TIMES = tuple(2.0**doublings for doublings in range(-3, 6))
"""The sizes of the curve, as multiples of the pool's."""
_OWN = TIMES.index(1.0)
_MOST_KEYS, _LEAST_KEYS = 1 << 17, 1 << 13
"""How many keys of the largest size are followed at most. Whenever there are more requests than can be followed, this
number is halved, down to `_LEAST_KEYS`."""
_PIECES = 16
"""How many pieces a window has. It moves by one piece at a time. There is a curve once it has half of its pieces."""
_WINDOW_POOLS, _WINDOW_REQUESTS = 8, 320
"""The requests of a whole window look up at least this many blocks for each slot of the pool, and there are at least
this many requests."""
_SIZE_TOLERANCE = 0.1
"""If the size of the pool changes by more than this fraction, the curve begins anew."""
_MOST_WAITING = 1 << 20
"""Once this many keys wait to be followed, which take 8 MiB, further requests are dropped and the curve begins anew."""
_AT_ONCE = 2048
"""How many beginnings and ends of requests are followed in one call at most."""
_EVENTS_WITHOUT_PAUSE = 8
"""After this many beginnings and ends, other threads may run."""
_HOT_SHARE, _HOT_REQUESTS, _MOST_COUNTED = 0.01, 100, 4096
"""A first key of chains is hot if more than this fraction of the requests have it, after at least this many requests.
When more keys than `_MOST_COUNTED` are counted, all counts are halved."""
_HOT_POSITIONS = tuple(dict.fromkeys(int(1.25**number) for number in range(64)))
"""Which keys of a chain are counted, besides the first. Their distances grow, because a chain has too many keys to
count all of them."""
_LEAST_ERROR = 0.01
"""The error of a point of the curve is at least this large, as a fraction of the blocks."""
_IN_NO_LIST = len(TIMES)
"""The level of a run of which no size has a key."""
_HASHES = 1 << 32
"""How many hashes there are."""
_LONGEST = 1 << 17
"""Where only a sample of the keys is followed, keys of a chain at this position or later are never followed."""

Floats = npt.NDArray[np.float64]


class _Event(NamedTuple):
    """The beginning or the end of a request. `keys`: the keys of its chain at the beginning, or the keys that have been
    appended to it at the end. `looked_up`: the positions of the chain that the request has looked up, or None if this
    is an end. `counted`: how many blocks all requests of the pool had looked up by then, and how many of them hit.
    `state`: the state in which the request has ended."""

    running: Running
    keys: Sequence[bytes]
    tag: int
    now: float
    looked_up: range | None = None
    counted: tuple[int, int] = (0, 0)
    state: int = 0


class _Request(NamedTuple):
    """A running request. `length`: how many keys its chain had when it began. `runs`: the runs of the chain. If another
    request has used a run since, the run's `request` is that other one."""

    tag: int
    length: int
    runs: list[_Run]


class _Run:
    """Neighbouring keys of a chain that were used by the same requests.

    `names`: the keys. `kept`: how many of them each size has, from the first one on. `past`: the past of all of them
    (`kvstow.control.hazards`). `started`: when the last request that uses them began. `since`: since when they have
    waited in their class, whose cell is `first_cell + bin`. `level`: the number of the smallest size that has some of
    them while the run is in a list, or else `_IN_NO_LIST`. `request`: the last request that uses them, while it runs.
    """

    __slots__ = ("bin", "first_cell", "kept", "level", "names", "past", "request", "since", "started", "tag")

    def __init__(self, tag: int, names: Sequence[bytes], kept: list[int]) -> None:
        self.tag, self.names, self.kept = tag, names, kept
        self.past = self.first_cell = self.bin = 0
        self.since, self.started, self.level = 0.0, -inf, _IN_NO_LIST
        self.request: _Request | None = None

    @property
    def first(self) -> tuple[int, bytes]:
        return self.tag, self.names[0]


class _Size:
    """A simulated pool of `num_slots` slots. `room`: how many of the keys that are followed fit into it. `used`: how
    many it has."""

    def __init__(self, num_slots: int, step: int) -> None:
        self.num_slots, self.room, self.used = num_slots, max(1, round(num_slots / step)), 0

    @property
    def seen(self) -> int:
        """About how many distinct blocks the size has been given so far, at most `num_slots`."""
        return round(self.num_slots * self.used / self.room)

    @property
    def is_full(self) -> bool:
        return self.used == self.room


class _Sizes:
    """Simulated pools of all sizes, over the same runs of keys. Each key that is followed stands for `step` blocks. The
    order of eviction is that of `Chains`.

    All sizes evict in the same order, so whatever a size evicts, all smaller sizes have evicted before. Therefore each
    run needs to be in only one list. The list is that of its level, which is the smallest size that has some of its
    keys, and of its cell. A size evicts only from the lists of its own level and of the levels below, because it has
    nothing of the other runs.
    """

    def __init__(self, num_slots: Sequence[int], step: int, hazards: Hazards, lock: Lock, *, is_lru: bool) -> None:
        self.is_lru = is_lru
        self.sizes = [_Size(size, step) for size in num_slots]
        self._hazards, self._lock, self._places = hazards, lock, hazards.places
        self._first_cells: dict[tuple[int, int], int] = {}
        self._runs: OrderedDict[tuple[int, bytes], _Run] = OrderedDict()
        """All runs by their first key, the one used longest ago first. Of one chain, the last run comes first. When the
        runs are too many, the first ones are dropped, so whenever a key is known, all keys before it are, too."""
        self._by_bin = [OrderedDict[_Run, None]() for _ in range(NUM_BINS)]
        """For each bin, the runs that wait in it, the oldest first. At least one size has keys of each run."""
        self._lists: dict[tuple[int, int], dict[_Run, None]] = {}
        """The same runs by level and cell, the oldest first. There are no empty lists."""
        self._filled: list[int] = []
        """For each level, an integer that has a bit set for each of its lists, in the order of the places, as in
        `Order`. Empty if the places have changed, until the integers are computed anew."""
        self._num_keys, self._most_keys = 0, sum([size.room for size in self.sizes])
        self._running: dict[Running, _Request] = {}

    def admit(self, event: _Event, names: Sequence[bytes], asked: range) -> list[int]:
        """Follow the beginning of a request, whose chain has the keys `names`. `asked`: the positions that it has
        looked up. Returns for each size how many of these it has without a gap, from the first one on."""
        now = event.now
        self._renew()
        self._pass_time(now)
        request = self._running[event.running] = _Request(event.tag, len(event.keys), [])
        request.runs.extend(self._use(request, names, now))
        hits = [_count_hits(request.runs, number, asked) for number in range(len(self.sizes))]
        self._wait(request.runs, RUNNING, now)
        while self._num_keys > self._most_keys:
            self._drop(self._runs.popitem(last=False)[1])
        return hits

    def length_of(self, running: Running) -> int | None:
        """Return how many keys the chain of a request had when it began, or None if the request is not followed."""
        request = self._running.get(running)
        return None if request is None else request.length

    def end(self, running: Running, more: Sequence[bytes], state: int, now: float) -> None:
        """Follow the end of a request in this state. `more`: the keys that were appended to its chain."""
        request = self._running.pop(running)
        self._renew()
        self._pass_time(now)
        runs = [run for run in request.runs if run.request is request]
        new = self._use(request, more, now)
        if self.is_lru:  # the start decides when a run is evicted, and evicted keys are not brought back at the end
            self._wait(new, state, now)
        else:
            for run in runs:
                self._unlist(run)
            self._wait([*runs, *new], state, now)
        for run in [*runs, *new]:
            run.request = None
        self._merge([*runs, *new])

    # -- chains ---------------------------------------------------------------------------------------------

    def _use(self, request: _Request, names: Sequence[bytes], now: float) -> list[_Run]:
        """Let the request use these keys, which are the next ones of its chain. Returns their runs, which are then in
        no list."""
        found: list[_Run] = []
        at = 0
        while at < len(names):
            run = self._runs.get((request.tag, names[at]))
            if run is None:
                run = _Run(request.tag, names[at:], [0] * len(self.sizes))
                self._runs[run.first] = run
                self._num_keys += len(run.names)
            elif run.request is request:  # the chain repeats a key, so it is not a real chain
                break
            else:
                same = _count_same(run.names, names, at)
                if same < len(run.names):
                    run = self._split(run, same)
                else:
                    self._unlist(run)
            if now - run.started >= SAME_USE:
                run.past = used_again(run.past, 0.0 if run.request is not None else now - run.since)
            run.started, run.request = now, request
            found.append(run)
            at += len(run.names)
        for run in reversed(found):
            self._runs.move_to_end(run.first)
        return found

    def _split(self, run: _Run, length: int) -> _Run:
        """Split the run after `length` keys. Returns a new run of these keys, which is in no list."""
        head = _Run(run.tag, run.names[:length], [min(kept, length) for kept in run.kept])
        head.past, head.started, head.since, head.request = run.past, run.started, run.since, run.request
        self._runs[head.first] = head
        run.names, run.kept = run.names[length:], [max(0, kept - length) for kept in run.kept]
        self._find_level(run)
        if self._runs.setdefault(run.first, run) is not run:  # the keys of this client form no real chains
            self._drop(run)
        return head

    def _merge(self, runs: Sequence[_Run]) -> None:
        """Merge neighbouring runs that have the same past, if no size has a gap between them."""
        last: _Run | None = None
        for run in runs:
            if last is None or last.past != run.past or not _is_joint(last, run):
                last = run
                continue
            self._unlist(run)
            del self._runs[run.first]
            last.names = [*last.names, *run.names]
            last.kept = [one + other for one, other in zip(last.kept, run.kept, strict=True)]

    def _drop(self, run: _Run) -> None:
        """Forget the run in all sizes. The caller has removed it from `_runs`."""
        self._unlist(run)
        for size, kept in zip(self.sizes, run.kept, strict=True):
            size.used -= kept
        run.kept, run.request = [0] * len(self.sizes), None
        self._num_keys -= len(run.names)

    def defects(self) -> list[str]:
        """Return inconsistencies. O(runs): for integrity checks."""
        runs = self._runs.values()
        found = [
            f"the count of keys of size {number} is wrong"
            for number, size in enumerate(self.sizes)
            if not sum([run.kept[number] for run in runs]) == size.used <= size.room
        ]
        if self._num_keys != sum([len(run.names) for run in runs]):
            found.append("the count of keys is wrong")
        listed = {run for each in self._lists.values() for run in each}
        if listed != {run for run in runs if any(run.kept)}:
            found.append("the order of eviction lacks runs, or has others")
        return found

    # -- stores and eviction --------------------------------------------------------------------------------

    def _wait(self, runs: Sequence[_Run], state: int, now: float) -> None:
        """Let these runs, which are in no list, wait from now on in this state, and store the keys that a size
        lacks."""
        for run in runs:
            run.first_cell = 0 if self.is_lru else self._first_cell(state, run.past)
            run.bin, run.since = 0, now
        for number in range(len(self.sizes)):
            self._store(number, runs, is_running=state == RUNNING)
        for run in reversed(runs):
            run.level = next((number for number, kept in enumerate(run.kept) if kept), _IN_NO_LIST)
            if run.level != _IN_NO_LIST:
                self._by_bin[0][run] = None
                self._put(run)

    def _store(self, number: int, runs: Sequence[_Run], *, is_running: bool) -> None:
        """Store the keys of these runs of a chain that size `number` lacks. See `Chains.limits` for what a store may
        evict. If a key of a running request is refused, all keys after it are refused, too."""
        size, place = self.sizes[number], self._places.place
        for run in runs:
            missing = len(run.names) - run.kept[number]
            if not missing:
                continue
            found = min(missing, size.room - size.used)
            if found < missing:
                limit = inf if self.is_lru else place[run.first_cell]
                freed = self._evict(number, missing - found, nextafter(limit, 0.0) if is_running else limit)
                size.used -= freed
                found += freed
            run.kept[number] += found
            size.used += found
            if found < missing and is_running:
                break

    def _evict(self, number: int, count: int, limit: float) -> int:
        """Evict up to `count` keys from size `number`, but none with a place above `limit`. Returns how many were
        evicted."""
        if not self._filled:
            self._rank_lists()
        filled = 0
        for bits in self._filled[: number + 1]:
            filled |= bits
        freed = 0
        while filled and freed < count:
            lowest = filled & -filled
            filled ^= lowest
            cell = self._places.cells[lowest.bit_length() - 1]
            if self._places.place[cell] > limit:
                break
            for level in range(number, -1, -1):  # runs of which smaller sizes have nothing are older
                runs = self._lists.get((level, cell))
                if runs is not None:
                    freed += self._evict_from(runs, number, count - freed)
        return freed

    def _evict_from(self, runs: Iterable[_Run], number: int, count: int) -> int:
        freed, emptied = 0, []
        for run in runs:
            if freed == count:
                break
            evicted = min(run.kept[number], count - freed)
            run.kept[number] -= evicted
            freed += evicted
            if not run.kept[number]:
                emptied.append(run)
        for run in emptied:
            self._find_level(run)
        return freed

    # -- lists ----------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        """Take over the places that the pool has computed since."""
        if self._places is not self._hazards.places:
            self._places, self._filled = self._hazards.places, []

    def _rank_lists(self) -> None:
        self._filled = [0] * len(self.sizes)
        for level, cell in self._lists:
            self._filled[level] |= 1 << self._places.rank[cell]

    def _first_cell(self, state: int, past: int) -> int:
        found = self._first_cells.get((state, past))
        if found is None:
            with self._lock:
                found = self._first_cells[state, past] = self._hazards.first_cell(state, past)
            self._renew()
        return found

    def _put(self, run: _Run) -> None:
        key = run.level, run.first_cell + run.bin
        runs = self._lists.get(key)
        if runs is not None:
            runs[run] = None
            return
        self._lists[key] = {run: None}
        if self._filled:
            self._filled[run.level] |= 1 << self._places.rank[key[1]]

    def _take(self, run: _Run) -> None:
        key = run.level, run.first_cell + run.bin
        runs = self._lists[key]
        del runs[run]
        if not runs:
            del self._lists[key]
            if self._filled:
                self._filled[run.level] &= ~(1 << self._places.rank[key[1]])

    def _find_level(self, run: _Run) -> None:
        """Put the run into the list of its level. Some size may have lost its last key of the run."""
        level = next((number for number, kept in enumerate(run.kept) if kept), _IN_NO_LIST)
        if level == _IN_NO_LIST:
            self._unlist(run)
        elif level != run.level:
            self._take(run)
            run.level = level
            self._put(run)

    def _unlist(self, run: _Run) -> None:
        if run.level != _IN_NO_LIST:
            del self._by_bin[run.bin][run]
            self._take(run)
            run.level = _IN_NO_LIST

    def _pass_time(self, now: float) -> None:
        """Move the runs that have waited for longer than their bin says. The last bin comes first: the runs that an
        earlier bin passes on are newer, and are appended, so each bin keeps its oldest run first."""
        if self.is_lru:
            return
        for number in range(NUM_BINS - 2, -1, -1):
            runs, latest = self._by_bin[number], now - UPPER[number]
            while runs:
                run = next(iter(runs))
                if run.since > latest:
                    break
                del runs[run]
                self._take(run)
                run.bin = max(number + 1, bin_of(now - run.since))
                self._by_bin[run.bin][run] = None
                self._put(run)


def _count_same(names: Sequence[bytes], others: Sequence[bytes], start: int) -> int:
    """Return how many of the names are the same as the others from position `start` on. At least the first is. A key
    stands for all keys before it, so a binary search is enough."""
    most = min(len(names), len(others) - start)
    if names[most - 1] == others[start + most - 1]:
        return most
    return bisect_left(range(most), True, key=lambda at: names[at] != others[start + at])


def _count_hits(runs: Sequence[_Run], number: int, asked: range) -> int:
    """Return how many of the positions `asked` of a chain size `number` has without a gap, from the first one on."""
    first, at = 0, asked.start
    for run in runs:
        end = first + len(run.names)
        if at < end:
            at = max(at, first + run.kept[number])
            if at < end:
                break
        first = end
    return max(0, min(at, asked.stop) - asked.start)


def _is_joint(run: _Run, following: _Run) -> bool:
    """Whether every size that has keys of the following run has all keys of this one."""
    length = len(run.names)
    return all(kept == length or not other for kept, other in zip(run.kept, following.kept, strict=True))


class _Sample:
    """Chooses the keys of chains that are followed, which are one in `step`, a power of two. Each stands for `step`
    blocks.

    Whether a key is chosen depends on its hash, so that it is chosen in every chain or in none. To hash all keys of a
    chain would take longer than to follow the chosen ones. So only some positions are looked at, fewer with the
    distance from the root, each in the middle of the positions that it stands for. In return, a key at such a position
    is chosen for more of the hashes: if it stands for `step` positions, it is always chosen. This is the same in all
    chains, because a key has the same position in each.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._hot = _HotBeginnings()
        self._positions, self._limits = list[int](), list[int]()
        first = 0
        while self.step > 1 and first < _LONGEST:
            span = 1 << max(0, min(self.step, first // 4).bit_length() - 1)
            self._positions.append(first + span // 2)
            self._limits.append(span * _HASHES // self.step)
            first += span

    def choose(
        self, keys: Sequence[bytes], tag: int, start: int, *, has_begun: bool
    ) -> tuple[Sequence[int], list[float]]:
        """Return the indices of the keys that are followed, and how many blocks each of them stands for. `start`: the
        position of the first key in its chain. `has_begun`: whether the keys are the chain of a request that has just
        begun.

        Of the first keys that many requests have in common, every `step`-th is followed. If they were chosen by their
        hashes, the first block would be followed for all of these requests or for none of them, and the estimate would
        be far off.
        """
        first = bisect_left(self._positions, start)
        looked_at = [at - start for at in self._positions[first : bisect_left(self._positions, start + len(keys))]]
        if not looked_at:
            return (), []
        hashes = [crc32(keys[at], tag) for at in looked_at]
        hot = self._hot.length(hashes) if has_begun else 0
        end = 0 if not hot else looked_at[hot] if hot < len(looked_at) else len(keys)
        places = range(0, looked_at[hot - 1] + 1 if hot else 0, self.step)
        beginning = [looked_at[bisect_left(looked_at, at)] for at in places]
        limits = self._limits[first : first + len(looked_at)]
        found = [at for at, name, limit in zip(looked_at, hashes, limits, strict=True) if name < limit and at >= end]
        weights = [float(min(self.step, end - at)) for at in places] + [float(self.step)] * len(found)
        return [*beginning, *found], weights


class _HotBeginnings:
    """Finds the first keys of chains that more than 1 % of the requests have. The number of counted keys is bounded."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total = 0

    def length(self, hashes: Sequence[int]) -> int:
        """Count a request, and return how many of the first keys of its chain are hot. A chain that has a key has all
        keys before it, so it is enough to count the keys at some positions."""
        self._total += 1
        hot = 0
        for place in (0, *_HOT_POSITIONS):
            if place >= len(hashes):
                break
            name = hashes[place]
            self._counts[name] = count = self._counts.get(name, 0) + 1
            if self._total < _HOT_REQUESTS or count <= _HOT_SHARE * self._total:
                break
            hot = place + 1
        if len(self._counts) > _MOST_COUNTED:
            self._total //= 2
            self._counts = {name: count // 2 for name, count in self._counts.items() if count > 1}
        return hot


class _Piece:
    """A piece of a window, and sums over its requests.

    `blocks`: how many blocks the requests have looked up. `sampled`: how many blocks the followed keys among them stand
    for. `squares`: the sum of the squares of `sampled` of each request. `sums`: three rows with a column for each size:
    how many of the `sampled` blocks hit, the sum of the squares of this, and the sum of its products with `sampled`.
    The squares and products serve for estimating the error. `full`: for each size, whether it was full when the piece
    began. `counted` and `ended`: what the pool had counted when the piece began and when it ended, see `_Event`.
    """

    def __init__(self, sizes: Sequence[_Size], counted: tuple[int, int]) -> None:
        self.requests = self.blocks = 0
        self.sampled = self.squares = 0.0
        self.sums: Floats = np.zeros((3, len(TIMES)))
        self.full = [size.is_full for size in sizes]
        self.counted = self.ended = counted

    def add(self, sampled: float, hits: Sequence[float]) -> None:
        self.sampled += sampled
        self.squares += sampled * sampled
        found = np.array(hits, np.float64)
        sums = self.sums
        sums[0] += found
        sums[1] += found * found
        sums[2] += sampled * found


class Curve:
    """Follows the requests of a pool and estimates its curve. `admit` and `end` are called with the pool's lock held,
    and take a microsecond or two. All others are called without it, and `follow` from one thread only."""

    def __init__(self, hazards: Hazards, lock: Lock, clock: Callable[[], float], most_keys: int = _MOST_KEYS) -> None:
        self._hazards, self._lock, self._clock = hazards, lock, clock
        self._following = Lock()
        """Held while one request is followed, so that threads which read the curve find sums of whole requests."""
        self._waiting: deque[_Event] = deque()
        self._num_waiting, self._most_keys, self._is_behind = 0, most_keys, False
        self._followed, self._sample = _Sizes((), 1, hazards, lock, is_lru=False), _Sample(1)
        self._num_slots, self._began, self._blocks = 0, 0.0, 0
        self._counted = (0, 0)
        self._start_window()

    @property
    def step(self) -> int:
        """One key in this many is followed."""
        return self._sample.step

    @property
    def _sizes(self) -> Sequence[_Size]:
        return self._followed.sizes

    # -- requests, with the pool's lock ---------------------------------------------------------------------

    def admit(
        self, running: Running, keys: Sequence[bytes], now: float, looked_up: tuple[int, int] | None, pool: LookupStats
    ) -> None:
        """Note that a request has begun that uses this chain of keys. `looked_up`: the begin and end of the positions
        that it has looked up, or None if it has looked up all. `pool`: what the pool has counted so far."""
        asked = range(*(looked_up or (0, len(keys))))
        counted = pool.query_blocks, pool.hit_blocks
        self._add(_Event(running, tuple(keys), running.order.tag, now, asked, counted))

    def end(self, running: Running, more: Sequence[bytes], state: int, now: float) -> None:
        """Note that a request has ended in this state. `more`: the keys that were appended to its chain."""
        self._add(_Event(running, tuple(more), running.order.tag, now, state=state))

    def _add(self, event: _Event) -> None:
        if self._num_waiting >= _MOST_WAITING:
            self._is_behind = True
            return
        self._waiting.append(event)
        self._num_waiting += len(event.keys) + 1

    # -- following ------------------------------------------------------------------------------------------

    def follow(self, num_slots: int, *, is_lru: bool) -> None:
        """Follow the requests that have begun or ended lately. The pool has `num_slots` slots and, with `is_lru`, the
        policy `lru`."""
        with self._lock:
            events = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
            self._num_waiting -= sum([len(event.keys) + 1 for event in events])
            is_behind, self._is_behind = self._is_behind, False
        if is_behind:  # some requests were dropped, so begin anew with fewer keys
            self._most_keys = max(_LEAST_KEYS, self._most_keys // 2)
        is_other_size = abs(num_slots - self._num_slots) > _SIZE_TOLERANCE * self._num_slots
        if is_behind or is_other_size or is_lru != self._followed.is_lru:
            with self._following:
                self._begin(num_slots, is_lru=is_lru)
        for number, event in enumerate(events if num_slots else ()):
            with self._following:
                self._follow(event)
            if number % _EVENTS_WITHOUT_PAUSE == 0:
                time.sleep(0)  # so that the scheduler may run

    def _begin(self, num_slots: int, *, is_lru: bool) -> None:
        sizes = [max(1, round(times * num_slots)) for times in TIMES] if num_slots else []
        step = 1
        while max(sizes, default=0) > step * self._most_keys:
            step *= 2
        self._sample = _Sample(step)
        self._followed = _Sizes(sizes, step, self._hazards, self._lock, is_lru=is_lru)
        self._num_slots = num_slots
        self._began, self._blocks = self._clock(), 0
        self._start_window()

    def _start_window(self) -> None:
        self._pieces: tuple[_Piece, ...] = ()
        self._piece = _Piece(self._sizes, self._counted)

    def _follow(self, event: _Event) -> None:
        asked, names = event.looked_up, event.keys
        if asked is None:
            length = self._followed.length_of(event.running)
            if length is not None:
                if self.step > 1 and names:
                    names = [names[at] for at in self._sample.choose(names, event.tag, length, has_begun=False)[0]]
                self._followed.end(event.running, names, event.state, event.now)
            return
        self._move_window()
        self._counted = event.counted  # this includes what this request has looked up
        piece = self._piece
        piece.requests += 1
        piece.blocks += len(asked)
        self._blocks += len(asked)
        if self.step == 1:
            piece.add(len(asked), self._followed.admit(event, names, asked))
            return
        positions, weights = self._sample.choose(names, event.tag, 0, has_begun=True)
        asked = range(bisect_left(positions, asked.start), bisect_left(positions, asked.stop))
        hits = self._followed.admit(event, [names[at] for at in positions], asked)
        sums = [0.0, *accumulate(weights)]
        before = sums[asked.start]
        piece.add(sums[asked.stop] - before, [sums[asked.start + found] - before for found in hits])

    def _move_window(self) -> None:
        """Add the newest requests to the window as a piece if there are enough of them. Start a new window when the
        pool's own size has become full."""
        piece = self._piece
        if self._sizes[_OWN].is_full and not piece.full[_OWN]:
            self._start_window()
        elif piece.requests * _PIECES >= _WINDOW_REQUESTS and piece.blocks * _PIECES >= self._window_blocks:
            piece.ended = self._counted
            self._pieces = (*self._pieces[1 - _PIECES :], piece)
            self._piece = _Piece(self._sizes, self._counted)

    @property
    def _window_blocks(self) -> int:
        return self._num_slots * _WINDOW_POOLS

    def defects(self) -> list[str]:
        """Return inconsistencies. O(keys): for integrity checks."""
        return self._followed.defects()

    # -- what follows ---------------------------------------------------------------------------------------

    def evidence(self) -> CurveEvidence:
        """Return what has been observed, and how much of it a curve needs."""
        with self._following:
            return self._evidence()

    def _evidence(self) -> CurveEvidence:
        pieces = *self._pieces, self._piece
        requests, blocks = sum(one.requests for one in pieces), sum(one.blocks for one in pieces)
        seen = self._sizes[_OWN].seen if self._sizes else 0
        passed = self._clock() - self._began
        needed = self._num_slots, _WINDOW_REQUESTS // 2, self._window_blocks // 2
        left = None
        if passed > 0 and seen and self._blocks:
            lacking = max(0, needed[0] - seen) / seen + max(0, needed[2] - blocks) / self._blocks
            left = passed * lacking
        return CurveEvidence(seen, needed[0], requests, needed[1], blocks, needed[2], left)

    def curve(self) -> SizeCurve | None:
        """Return what each size would have hit in the window, or None while there is not enough evidence."""
        with self._following:
            return self._curve()

    def _curve(self) -> SizeCurve | None:
        pieces = self._pieces
        if len(pieces) < _PIECES // 2:
            return None
        sampled, squares = sum([piece.sampled for piece in pieces]), sum([piece.squares for piece in pieces])
        if not sampled:  # no key of the sample was looked up
            return None
        hits, squared_hits, mixed = np.sum([piece.sums for piece in pieces], axis=0)
        ratios = hits / sampled
        variance = np.maximum(0.0, squared_hits - 2 * ratios * mixed + ratios**2 * squares) / sampled**2
        queried, found = np.subtract(pieces[-1].ended, pieces[0].counted).tolist()
        own = found / queried if queried > 0 else float(ratios[_OWN])
        shift = own - float(ratios[_OWN])
        errors = _LEAST_ERROR + abs(shift) + 2 * np.sqrt(variance * (1 - 1 / self.step))
        points = [
            CurvePoint(
                size.num_slots,
                min(1.0, max(0.0, ratio + shift)),
                error,
                at_least=not pieces[0].full[row],
                seen_blocks=size.seen,
                seconds_left=self._seconds_left(row, pieces),
            )
            for row, (size, ratio, error) in enumerate(zip(self._sizes, ratios.tolist(), errors.tolist(), strict=True))
        ]
        return SizeCurve(tuple(points), sum(one.requests for one in pieces), sum(one.blocks for one in pieces))

    def _seconds_left(self, row: int, pieces: Sequence[_Piece]) -> float | None:
        """Return about how many seconds pass until this size has been full for a whole window. None if it has been, or
        if the size has no blocks yet."""
        size, lacking = self._sizes[row], sum(not piece.full[row] for piece in pieces) / _PIECES
        if pieces[0].full[row] or not size.seen:
            return None
        until_full = size.num_slots / size.seen - 1
        return (self._clock() - self._began) * (until_full + lacking * self._window_blocks / self._blocks)
