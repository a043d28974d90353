"""The curve of a pool: what pools of an eighth to 32 times its size would have hit.

All sizes use the rates of return that the pool has learned, because those belong to the traffic and not to a size. So
the place of a block is the same in every size, and so is its order among others; a size only says how many of the first
ones of that order are evicted. The chains that were used lately are kept once, for all sizes, as runs of neighbouring
keys, and each run knows how many of its keys every size has. A request takes its chain run by run: a thousand blocks
cost what a few runs cost. Very large pools are followed by a sample of the keys.

The scheduler only queues its requests; they are followed in `Curve.follow`, on the thread that ticks the pool.

A size that is not full has evicted nothing, so what it hits may only grow. A window begins when the pool's own size is
full, or what is hit while the sizes fill would count for them.
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
"""Keys of the largest size that are followed; fewer where the requests are more than can be followed."""
_PIECES = 16
"""Of a window. It moves piece by piece, and says something when it has half of them."""
_WINDOW_POOLS, _WINDOW_REQUESTS = 8, 320
"""A window has as many blocks as so many full pools, or so many requests if those are more."""
_SAME_SIZE = 0.1
_MOST_WAITING = 1 << 20
"""Keys of requests that are not followed yet: 8 MiB."""
_AT_ONCE = 2048
"""Beginnings and ends of requests that are followed in one call."""
_WITHOUT_PAUSE = 8
_HOT_SHARE, _HOT_REQUESTS, _MOST_COUNTED = 0.01, 100, 4096
_PLACES = tuple(dict.fromkeys(int(1.25**number) for number in range(64)))
_LEAST_ERROR = 0.01
_IN_NO_LIST = len(TIMES)
_HASHES = 1 << 32
_LONGEST = 1 << 17
"""Keys of a chain; further ones are not followed in very large pools."""

Floats = npt.NDArray[np.float64]


class _Event(NamedTuple):
    """A request has begun, with `looked_up`, or has ended in this `state`, with more keys of its chain. `counted`: the
    blocks that the pool's requests have looked up until then, and how many of those hit."""

    running: Running
    keys: Sequence[bytes]
    tag: int
    now: float
    looked_up: range | None = None
    counted: tuple[int, int] = (0, 0)
    state: int = 0


class _Request(NamedTuple):
    """A running request. `length`: of its chain when it began. `runs`: of the chain; those that another request has
    used since are that one's."""

    tag: int
    length: int
    runs: list[_Run]


class _Run:
    """Keys of a chain that follow each other and were used by the same requests, last by one that began at `started`.
    `past`: theirs (`kvstow.control.hazards`). `kept`: how many of them each size has, from the first one on. They wait
    in their class since the time `since`. `level`: the number of the smallest size that has some of them, as long as
    the run is in a list. `request`: the running one whose chain they are of."""

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
    """A pool of `num_slots`, with `room` for the keys that are followed, `used` of it."""

    def __init__(self, num_slots: int, step: int) -> None:
        self.num_slots, self.room, self.used = num_slots, max(1, round(num_slots / step)), 0

    @property
    def seen(self) -> int:
        """Distinct blocks that it has had room for, `num_slots` at most."""
        return round(self.num_slots * self.used / self.room)

    @property
    def is_full(self) -> bool:
        return self.used == self.room


class _Sizes:
    """Pools of all sizes, which have the same chains. `step`: each key that is followed stands for so many blocks.

    What a size evicts, all smaller ones have evicted before. So a run is in one list only, by the smallest size that
    has some of it, its class and its time of waiting: see `Chains`, whose order of eviction this is.
    """

    def __init__(self, num_slots: Sequence[int], step: int, hazards: Hazards, lock: Lock, *, is_lru: bool) -> None:
        self.is_lru = is_lru
        self.sizes = [_Size(size, step) for size in num_slots]
        self._hazards, self._lock, self._places = hazards, lock, hazards.places
        self._first_cells: dict[tuple[int, int], int] = {}
        self._runs: OrderedDict[tuple[int, bytes], _Run] = OrderedDict()
        """By the first key. What was used longest ago comes first, and of a chain its end: so whatever is known, all
        keys before it are, too."""
        self._by_bin = [OrderedDict[_Run, None]() for _ in range(NUM_BINS)]
        """What waits for so long and some size has, the oldest first."""
        self._lists: dict[tuple[int, int], dict[_Run, None]] = {}
        """By level and cell, each with the oldest first; none is empty."""
        self._filled: list[int] = []
        """For each level a bit for each of its lists, in the order of the places; empty after those have changed."""
        self._num_keys, self._most_keys = 0, sum([size.room for size in self.sizes])
        self._running: dict[Running, _Request] = {}

    def admit(self, event: _Event, names: Sequence[bytes], asked: range) -> list[int]:
        """A request begins. Returns how many of the keys that it has looked up each size has, from the first one on."""
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
        """How many keys its chain had when the request began; None if it is not followed."""
        request = self._running.get(running)
        return None if request is None else request.length

    def end(self, running: Running, more: Sequence[bytes], state: int, now: float) -> None:
        request = self._running.pop(running)
        self._renew()
        self._pass_time(now)
        runs = [run for run in request.runs if run.request is request]
        new = self._use(request, more, now)
        if self.is_lru:  # the order is that of the starts, and what was evicted meanwhile is not brought back
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
        """The request has begun to use these keys, the next ones of its chain. Returns their runs, which are in no
        list."""
        found: list[_Run] = []
        at = 0
        while at < len(names):
            run = self._runs.get((request.tag, names[at]))
            if run is None:
                run = _Run(request.tag, names[at:], [0] * len(self.sizes))
                self._runs[run.first] = run
                self._num_keys += len(run.names)
            elif run.request is request:  # the chain repeats a key, so it is none
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
        """Returns the first keys of the run as one of its own, which is in no list."""
        head = _Run(run.tag, run.names[:length], [min(kept, length) for kept in run.kept])
        head.past, head.started, head.since, head.request = run.past, run.started, run.since, run.request
        self._runs[head.first] = head
        run.names, run.kept = run.names[length:], [max(0, kept - length) for kept in run.kept]
        self._find_level(run)
        if self._runs.setdefault(run.first, run) is not run:  # of a client whose chains are none
            self._drop(run)
        return head

    def _merge(self, runs: Sequence[_Run]) -> None:
        """Make one run of neighbours that have the same past and that every size has without a gap."""
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
        """Nothing is known of the run any more."""
        self._unlist(run)
        for size, kept in zip(self.sizes, run.kept, strict=True):
            size.used -= kept
        run.kept, run.request = [0] * len(self.sizes), None
        self._num_keys -= len(run.names)

    def defects(self) -> list[str]:
        """Inconsistencies. O(runs): for integrity checks."""
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
        """Runs that are in no list wait from now on, in this state, and what a size lacks of them is stored."""
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
        """Of a chain, store what this size lacks. See `Chains.limits` for what may be evicted. What follows a refused
        block of a running request is refused, too."""
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
        """Evict up to so many keys from a size: none with a place above the limit. Returns how many."""
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
            for level in range(number, -1, -1):  # what smaller sizes have evicted before is the oldest
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
        """Some size has lost its last key of the run, if it had any."""
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
        """Move on what has waited for longer than its bin says. From the last bin to the first, so that each keeps the
        oldest first."""
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
    """How many of the names, the first of which does, are the same as the others from `start` on. As a key stands for
    all keys before it, a few comparisons are enough."""
    most = min(len(names), len(others) - start)
    if names[most - 1] == others[start + most - 1]:
        return most
    return bisect_left(range(most), True, key=lambda at: names[at] != others[start + at])


def _count_hits(runs: Sequence[_Run], number: int, asked: range) -> int:
    """How many of the positions `asked` of the chain the size has, from the first one on."""
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
    length = len(run.names)
    return all(kept == length or not other for kept, other in zip(run.kept, following.kept, strict=True))


class _Sample:
    """Which keys of chains are followed: one of `step`, a power of two. Each stands for as many blocks.

    Far from its beginning, only some positions of a chain are looked at, each in the middle of those that it stands
    for: to hash all keys would take longer than to follow those of the sample. A key has the same position in every
    chain that has it.
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
        """Which of the keys are followed, and how many blocks each stands for. They come after the first `start` ones
        of their chain. `has_begun`: they are those of a request that has begun just now.

        Of those that many requests begin with, every `step`-th is followed: a sample by hash would have the first block
        of all these requests, or of none.
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
    """Which first keys of chains more than 1 % of the requests have. Bounded."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total = 0

    def length(self, hashes: Sequence[int]) -> int:
        """How many of the first keys of this request's chain are hot. Whatever has a key has all keys before it, so it
        is enough to count at some places."""
        self._total += 1
        hot = 0
        for place in (0, *_PLACES):
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
    """A piece of a window. `sampled`: the blocks that were looked up, as many as the sample stands for; `squares`: the
    sum of their squares over the requests. `sums`: for each size how many of them hit, the squares of that, and its
    products with the first, for the error. `full`: the sizes that were full when it began. `counted`, `ended`: what the
    pool had counted when it began and ended."""

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
    """Follows the requests of a pool. `admit` and `end` are called with the pool's lock held, and take a microsecond or
    two; the others are called without it, `follow` from one thread."""

    def __init__(self, hazards: Hazards, lock: Lock, clock: Callable[[], float], most_keys: int = _MOST_KEYS) -> None:
        self._hazards, self._lock, self._clock = hazards, lock, clock
        self._following = Lock()
        """Held for one request at a time: so others read what belongs together."""
        self._waiting: deque[_Event] = deque()
        self._num_waiting, self._most_keys, self._is_behind = 0, most_keys, False
        self._followed, self._sample = _Sizes((), 1, hazards, lock, is_lru=False), _Sample(1)
        self._num_slots, self._began, self._blocks = 0, 0.0, 0
        self._counted = (0, 0)
        self._start_window()

    @property
    def step(self) -> int:
        """One of so many keys is followed."""
        return self._sample.step

    @property
    def _sizes(self) -> Sequence[_Size]:
        return self._followed.sizes

    # -- requests, with the pool's lock ---------------------------------------------------------------------

    def admit(
        self, running: Running, keys: Sequence[bytes], now: float, looked_up: tuple[int, int] | None, pool: LookupStats
    ) -> None:
        """A request has begun that uses this chain of keys, and has looked up these positions of it, or all. `pool`:
        what the pool has counted until now."""
        asked = range(*(looked_up or (0, len(keys))))
        counted = pool.query_blocks, pool.hit_blocks
        self._add(_Event(running, tuple(keys), running.order.tag, now, asked, counted))

    def end(self, running: Running, more: Sequence[bytes], state: int, now: float) -> None:
        """The request has ended in this state, with more keys at the end of its chain."""
        self._add(_Event(running, tuple(more), running.order.tag, now, state=state))

    def _add(self, event: _Event) -> None:
        if self._num_waiting >= _MOST_WAITING:
            self._is_behind = True
            return
        self._waiting.append(event)
        self._num_waiting += len(event.keys) + 1

    # -- following ------------------------------------------------------------------------------------------

    def follow(self, num_slots: int, *, is_lru: bool) -> None:
        """Follow the requests that have begun or ended lately. The pool has so many slots."""
        with self._lock:
            events = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
            self._num_waiting -= sum([len(event.keys) + 1 for event in events])
            is_behind, self._is_behind = self._is_behind, False
        if is_behind:  # some requests are missing: begin anew, with fewer keys
            self._most_keys = max(_LEAST_KEYS, self._most_keys // 2)
        is_other_size = abs(num_slots - self._num_slots) > _SAME_SIZE * self._num_slots
        if is_behind or is_other_size or is_lru != self._followed.is_lru:
            with self._following:
                self._begin(num_slots, is_lru=is_lru)
        for number, event in enumerate(events if num_slots else ()):
            with self._following:
                self._follow(event)
            if number % _WITHOUT_PAUSE == 0:
                time.sleep(0)  # lets the scheduler run

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
        self._counted = event.counted  # with what this request has looked up
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
        """Take the newest requests into the window if there are enough of them."""
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
        """Inconsistencies. O(keys): for integrity checks."""
        return self._followed.defects()

    # -- what follows ---------------------------------------------------------------------------------------

    def evidence(self) -> CurveEvidence:
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
        """What each size would have hit in the window; None before there is evidence for it."""
        with self._following:
            return self._curve()

    def _curve(self) -> SizeCurve | None:
        pieces = self._pieces
        if len(pieces) < _PIECES // 2:
            return None
        sampled, squares = sum([piece.sampled for piece in pieces]), sum([piece.squares for piece in pieces])
        if not sampled:  # where all keys of a client end with the same byte, none may be chosen
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
        """About how long until a window has passed in which this size was full; None if one has."""
        size, lacking = self._sizes[row], sum(not piece.full[row] for piece in pieces) / _PIECES
        if pieces[0].full[row] or not size.seen:
            return None
        until_full = size.num_slots / size.seen - 1
        return (self._clock() - self._began) * (until_full + lacking * self._window_blocks / self._blocks)
