"""The order of eviction: the blocks of a pool in parts of chains, by class and by how long they have waited.

A `ChainPart` is a number of blocks that one request has used last, and that have the same past. A request takes its
whole chain of blocks into parts of its own when it is admitted, a few at most, and what it finds there is
mostly a whole part of the request before: so a chain of a thousand blocks costs what a few parts cost.

A part is watched from the start of its request, and again from its end. Each watch is in the list of its cell, a class
and a bin of waiting time (`kvstow.control.hazards`), and moves on to the next bin when it is due. Parts with evictable
slots are in the lists of their namespace (`Order`), which keep a bit for each list that is not empty, in the order of
the cells' places: the lowest bit names the list whose oldest part is evicted next, its end first. All other watches
are in lists of the pool, for learning alone: those of evicted blocks, and those of requests' starts after their end,
because the hazard of running blocks would be wrong if nobody looked at them after that.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, repeat
from math import inf
from typing import Any, NamedTuple

import numpy as np

from kvstow.collector import unvisited
from kvstow.control.evictedblocks import EvictedBlocks
from kvstow.control.expectedblocks import ExpectedBlocks
from kvstow.control.hazards import NUM_BINS, UPPER, USED_ONCE, Hazards, bin_of, used_again
from kvstow.control.keyhashes import hash_keys
from kvstow.control.slots import RefCounts, SlotKeys, SlotSet, values_at
from kvstow.endings import FETCHED, OTHER, RUNNING

SAME_USE = 2.0
"""Seconds. A use that begins so soon after the one before does not count: that alone takes bursts their power."""
_LAST_BIN = NUM_BINS - 1
_MOST_MOVES = 1024
"""Watches that move on in one call."""
_MOST_STEPS = 256
"""Newer watches that one is put before: of a request that began long ago, that may be wrong by a little."""
_MOST_WAITING = 4096
"""Evicted keys that wait to be remembered: many at once cost little more than one."""
_MOST_EXPECTED = 1 << 18
"""Absent blocks of running and lately ended requests."""
_EXPECTED_SECONDS = 60.0
"""After the end of its request, a block that is not stored by then is remembered like an evicted one."""
_MOST_KNOWN = 1 << 15
"""Parts that are known after all of their blocks were evicted."""


class Watch:
    """Blocks of a part wait for their next use, since the time `since`, in the class whose first cell is given. `home`:
    the list that it is in. `turn`: of several since the same time, the policy `lru` evicts the lowest first."""

    __slots__ = ("bin", "first_cell", "home", "next", "part", "prev", "since", "turn")

    def __init__(self, part: ChainPart, first_cell: int, since: float) -> None:
        self.part, self.first_cell, self.since = part, first_cell, since
        self.bin = self.turn = 0
        self.home: WatchList | None = None
        self.next: Any = None
        self.prev: Any = None

    @property
    def cell(self) -> int:
        return self.first_cell + self.bin


class WatchList:
    """The watches of one cell, as a ring from the oldest (`next`) to the newest (`prev`). `order`: whose list it is;
    None for one that is only for learning. `is_queued`: it is among those that become due."""

    __slots__ = ("bin", "cell", "is_queued", "next", "order", "prev")

    def __init__(self, cell: int, order: Order | None) -> None:
        self.cell, self.bin, self.order = cell, cell % NUM_BINS, order
        self.is_queued = False
        self.next: Any = self
        self.prev: Any = self

    def __iter__(self) -> Iterator[Watch]:
        """The oldest first. The list must not change meanwhile."""
        watch = self.next
        while watch is not self:
            yield watch
            watch = watch.next


class ChainPart:
    """Blocks that one request has used last, and nobody since. `past`: theirs (`kvstow.control.hazards`); 0 if no
    request has used them yet. `weight`: of one block, in learning. `request`: the running one that has used them;
    the part is among its `parts`. `fetch`: see `Chains.publish`.

    Each block is counted once: `resident` ones have a slot; `expected` ones are keys of the part in `Order.expected`,
    while their request is running or has just ended; `evicted` ones are remembered by the number of the part, roughly.
    `slots`: of the resident ones, in prefix order, without those that `Chains` has set aside; some may have another
    owner meanwhile. `absent`: the keys of the expected ones; some may be so no longer. `by_start`: when it is evicted
    follows from when its request has begun, even after the end. `is_shared`: requests of several engines run with it,
    so a GPU that has it is not the one that may need it next."""

    __slots__ = (
        *(
            "absent",
            "by_start",
            "ended",
            "evicted",
            "expected",
            "fetch",
            "is_shared",
            "number",
            "order",
            "past",
            "request",
            "resident",
            "running",
        ),
        *("slots", "weight"),
    )

    def __init__(self, number: int, order: Order, past: int) -> None:
        self.number, self.order, self.past = number, order, past
        self.resident = self.expected = self.evicted = self.fetch = 0
        self.weight = 0.0
        self.by_start = self.is_shared = False
        self.slots = array("I")
        self.absent: list[bytes] | None = None
        self.request: Running | None = None
        self.running: Watch | None = None
        self.ended: Watch | None = None

    @property
    def left(self) -> int:
        """How many blocks it has."""
        return self.resident + self.expected + self.evicted

    @property
    def home(self) -> Watch:
        """The watch that says when its blocks are evicted."""
        watch = self.running if self.by_start and self.running is not None else self.ended or self.running
        assert watch is not None
        return watch


class Running:
    """A request between its admission and its end. `engine`: whose GPU has its blocks. `parts`: of its chain, those
    that no other request has taken since, in the order of the chain, as the keys of a dict. `share`: what it weighs in
    learning. `is_incomplete`: some of its blocks have no slot, because their slots were lent to others or their store
    was refused; `on_incomplete` is called when that becomes so, with the lock held."""

    __slots__ = ("engine", "is_incomplete", "on_incomplete", "order", "parts", "share")

    def __init__(self, order: Order, share: float, on_incomplete: Callable[[], None], engine: int = 0) -> None:
        self.order, self.share, self.on_incomplete, self.engine = order, share, on_incomplete, engine
        self.parts: dict[ChainPart, None] = {}
        self.is_incomplete = False

    def lacks_blocks(self) -> None:
        """Some of its blocks have no slot, and will need one at the end."""
        if not self.is_incomplete:
            self.is_incomplete = True
            self.on_incomplete()


def ignore() -> None:
    """What is called when a request lacks blocks that has ended."""


class FoundKeys(NamedTuple):
    """Where the keys of a chain are: runs of the slots of the leading ones, and for the others the slot of each."""

    runs: Sequence[Sequence[int]]
    rest: Sequence[bytes] = ()
    slots: Sequence[int | None] = ()


class _Totals:
    """Of all namespaces of a pool. `expected`: blocks that may be stored soon."""

    __slots__ = ("expected",)

    def __init__(self) -> None:
        self.expected = 0


class Order:
    """The evictable parts of one namespace. Made by `Chains`. `is_over`: the namespace was forgotten."""

    __slots__ = ("_bits", "_hazards", "_version", "expected", "is_over", "lists", "tag", "totals")

    def __init__(self, hazards: Hazards, tag: int, totals: _Totals) -> None:
        self._hazards, self.tag, self.totals = hazards, tag, totals
        self.is_over = False
        self.lists: dict[int, WatchList] = {}
        """By cell, made on first use."""
        self.expected = ExpectedBlocks[ChainPart]()
        """The parts of absent blocks of requests that are running or have just ended."""
        self._bits, self._version = 0, -1

    def forget(self) -> None:
        """The namespace has neither blocks nor sessions any more."""
        self.totals.expected -= len(self.expected)
        self.expected, self.is_over = ExpectedBlocks[ChainPart](), True

    def filled(self, cell: int) -> None:
        """The list of this cell was empty, and is not."""
        if self._version == self._hazards.version:
            self._bits |= 1 << self._hazards.places.rank[cell]

    def emptied(self, cell: int) -> None:
        if self._version == self._hazards.version:
            self._bits &= ~(1 << self._hazards.places.rank[cell])

    def lowest(self) -> WatchList | None:
        """The list with the lowest place that is not empty. O(lists) after the places have changed, or O(1)."""
        hazards = self._hazards
        if self._version != hazards.version:
            rank = hazards.places.rank
            bits = bytearray(len(rank) // 8 + 1)
            for cell, watches in self.lists.items():
                if watches.next is not watches:
                    at = rank[cell]
                    bits[at >> 3] |= 1 << (at & 7)
            self._bits, self._version = int.from_bytes(bits, "little"), hazards.version
        bits_ = self._bits
        return self.lists[hazards.places.cells[(bits_ & -bits_).bit_length() - 1]] if bits_ else None

    def oldest(self) -> WatchList | None:
        """The list whose oldest part has waited longest. O(lists)."""
        found = [each for each in self.lists.values() if each.next is not each]
        return min(found, key=lambda each: (each.next.since, each.next.turn), default=None)

    def by_place(self) -> list[WatchList]:
        """The lists that are not empty, in the order of eviction."""
        rank = self._hazards.places.rank
        found = [each for each in self.lists.values() if each.next is not each]
        return sorted(found, key=lambda each: rank[each.cell])


class Limit(NamedTuple):
    """What a store may evict: what has a place below `place`, or the same one if `also_equal`; nothing of `part`."""

    place: float = inf
    also_equal: bool = True
    part: ChainPart | None = None

    def allows(self, place: float, victim: ChainPart) -> bool:
        return place < self.place or (self.also_equal and place == self.place and victim is not self.part)


NO_LIMIT = Limit()


class StoreLimit(NamedTuple):
    """What a store of the next `num_keys` keys may evict, and whose blocks they are."""

    num_keys: int
    limit: Limit
    running: Running | None


class Chains:
    """The parts of all namespaces of a pool, and what is remembered of evicted ones. Used under the pool's lock; each
    call is O(slots or keys given), and moves at most 1,024 parts on."""

    def __init__(self, hazards: Hazards, held: RefCounts) -> None:
        """`held`: slots that must not be evicted."""
        self.hazards, self._held = hazards, held
        self.is_lru = False
        """What was used longest ago is evicted, by the start of its last request, whatever its class."""
        self.evicted_blocks = EvictedBlocks()
        self._owner: list[ChainPart | None] = unvisited([])
        """The part of each slot. A part must not lead back to the pool when its request has ended: see
        `Requests.end`."""
        self._aside = SlotSet()
        """Held slots that are in no part's `slots`, because something tried to evict them. They return with the end of
        their last hold."""
        self._others: dict[int, WatchList] = {}
        """The lists for learning alone, by cell."""
        self._due: list[tuple[float, int, WatchList]] = []
        self._serial = count(1)
        self._known: dict[int, ChainPart] = {}
        """Parts with evicted blocks, by number, the first to be evicted first."""
        self._waiting: dict[int, tuple[list[bytes], array[int]]] = {}
        """Evicted keys and the numbers of their parts, by tag, that are not in the table yet."""
        self._num_waiting = 0
        self._totals = _Totals()
        self._just_ended: deque[tuple[float, ChainPart]] = deque()
        """With absent blocks, which are still expected."""

    def grow(self, num_slots: int) -> None:
        """The pool has the slots below `num_slots`."""
        self._owner.extend(repeat(None, max(0, num_slots - len(self._owner))))
        self._aside.grow(num_slots)

    def make_order(self, tag: int) -> Order:
        return Order(self.hazards, tag, self._totals)

    # -- requests -------------------------------------------------------------------------------------------

    def begin(
        self,
        order: Order,
        now: float,
        share: float = 1.0,
        on_incomplete: Callable[[], None] = lambda: None,
        engine: int = 0,
    ) -> Running:
        """A request is being admitted: its chain is given to `extend`, and then it is admitted. For the others see
        `Running`."""
        self.pass_time(now)
        return Running(order, share, on_incomplete, engine)

    def extend(self, running: Running, found: FoundKeys, now: float) -> None:
        """The next blocks of the chain of a request that is being admitted, the root first. They are not evicted before
        `admit`."""
        pieces: list[_Piece] = []
        for run in found.runs:
            for owner, some in self._owned(run):
                _add(pieces, owner, len(some), some, ())
        if found.rest:
            if found.slots.count(None) == len(found.rest):
                self._add_absent(pieces, running.order, found.rest)
            else:
                self._add_scattered(pieces, running.order, found.rest, found.slots)
        if len(pieces) > 1 and any(piece.part is None for piece in pieces):
            pieces = _without_gaps(pieces)
        for piece in pieces:
            if piece.part is None or piece.part.request is not running:
                self._take(running, piece, now)

    def admit(self, running: Running, now: float) -> None:
        """The whole chain was given to `extend`."""
        parts = [part for part in running.parts if part.left]
        running.parts = dict.fromkeys(parts)
        at = 0
        while at < len(parts):  # blocks of one class next to each other count as one in learning
            cell = self.hazards.first_cell(RUNNING, parts[at].past)
            end, total = at, 0
            while end < len(parts) and self.hazards.first_cell(RUNNING, parts[end].past) == cell:
                total += parts[end].left
                end += 1
            for part in parts[at:end]:
                part.weight = running.share / total
                part.running = Watch(part, cell, now)
            at = end
        for part in reversed(parts):
            assert part.running is not None
            part.running.turn = next(self._serial)
            if part.is_shared:  # it is not lent as a running one is
                part.ended = Watch(part, self.hazards.first_cell(OTHER, part.past), now)
                part.ended.turn = part.running.turn
                self._link(part.running, None)
            self._link(part.home, part.order if part.slots else None)

    def absorb(self, running: Running, blocks: Iterable[tuple[bytes, int | None]]) -> None:
        """A request is about to end. These are its blocks of all KV groups, in the order of the tokens that they end
        with: their keys, and the slots of those that are visible; the others are being stored. Those that are in none
        of its parts, such as those of windows, follow the ones before them from now on: so the end of a prefix is
        evicted before its beginning, in all groups alike."""
        owner, expected = self._owner, running.order.expected
        by_part: dict[ChainPart, list[int]] = {}
        current: ChainPart | None = None
        leading: list[tuple[bytes, int | None]] = []
        for key, slot in blocks:
            part = expected.get(key) if slot is None else owner[slot]
            if part is not None and part.request is running:
                current = part
                own = by_part.setdefault(part, [])
                for each in leading:
                    self._let_follow(part, own, *each)
                leading = []
                own += [] if slot is None else [slot]
            elif current is None:
                leading.append((key, slot))
            else:
                self._let_follow(current, by_part[current], key, slot)
        for part, own in by_part.items():
            listed = set(own)
            rest = [slot for slot in part.slots if slot not in listed and owner[slot] is part]
            part.slots = array("I", [*rest, *[slot for slot in own if slot not in self._aside]])
            self._settle(part)

    def _let_follow(self, part: ChainPart, own: list[int], key: bytes, slot: int | None) -> None:
        """A block that no running request needs becomes one of the part, whose slots in order are `own`."""
        if slot is None:
            if part.order.expected.get(key) is None and not part.order.is_over:
                self._expect(part, (key,))
            return
        other = self._owner[slot]
        if other is not None and other.request is None:
            self._observe(other, 1)
            self._owner[slot] = part
            part.resident += 1
            self._leave(other, 1, 0)
            own.append(slot)

    def end(self, running: Running, state: int, now: float) -> None:
        """The request has ended, in this state. What another request has started with since is that one's. Blocks that
        were given to `extend` since `admit` were used from now on only."""
        self.pass_time(now)
        for part in running.parts:
            if part.running is None and part.left:
                part.weight = running.share / part.left
                part.running = Watch(part, self.hazards.first_cell(RUNNING, part.past), now)
        for part in reversed(running.parts):
            part.request = None
            if part.running is None:  # all its blocks were removed
                continue
            part.by_start = self.is_lru
            if part.ended is not None:
                self._unlink(part.ended)
            part.ended = Watch(part, self.hazards.first_cell(state, part.past), now)
            part.ended.turn = next(self._serial)
            self._unlink(part.running)
            for watch in (part.running, part.ended):
                self._link(watch, part.order if part.slots and watch is part.home else None)
            if part.absent:
                self._just_ended.append((now, part))

    def _take(self, running: Running, piece: _Piece, now: float) -> None:
        """Blocks of one part, or of none, become the running request's."""
        before = piece.part
        past, is_shared = USED_ONCE, False
        if before is not None:
            past = before.past or USED_ONCE
            if before.running is None or now - before.running.since >= SAME_USE:
                past = used_again(before.past, 0.0 if before.ended is None else now - before.ended.since)
            if before.fetch == _UNUSED:
                before.fetch, before.past = _USED, past
                return
            self._observe(before, piece.count)
            other = before.request
            is_shared = other is not None and (other.engine != running.engine or before.is_shared)
        part = self._part_of(piece, running.order, past)
        part.past, part.request, part.is_shared = past, running, is_shared
        last = next(reversed(running.parts), None)
        is_open = last is not None and last.running is None and last.is_shared == is_shared
        if last is not None and is_open and last.past == past and last.left + part.left < _MOST_MERGED:
            self._merge(last, part)
        else:
            running.parts[part] = None

    def _part_of(self, piece: _Piece, order: Order, past: int) -> ChainPart:
        """Return a part that has the blocks of the piece and no others, and that no request has: the part that had them
        so far, if it has no others, or a new one."""
        before, resident = piece.part, sum(map(len, piece.runs))
        if before is not None and self._is_whole(piece, before, resident):
            self._unwatch(before)
            if before.request is not None:
                del before.request.parts[before]
            before.fetch = before.evicted = 0
            before.absent = None
            self._add_absent_blocks(before, piece.absent)
            return before
        part = ChainPart(next(self._serial), order, past)
        for run in piece.runs:
            self._own(part, run)
        expected = 0 if before is None else before.expected
        self._add_absent_blocks(part, piece.absent)
        if before is not None:
            self._leave(before, resident, len(piece.absent) - (expected - before.expected))
        return part

    def _is_whole(self, piece: _Piece, part: ChainPart, resident: int) -> bool:
        """Whether the piece, with so many slots, has all blocks of its part. It may have others too, see
        `_without_gaps`."""
        if resident < part.resident or piece.count < part.left:
            return False
        return not part.expected or part.order.expected.find(piece.absent).count(part) == part.expected

    def _add_absent_blocks(self, part: ChainPart, keys: Sequence[bytes]) -> None:
        """These blocks, which have no slot, become the part's."""
        if not keys:
            return
        if self._totals.expected < _MOST_EXPECTED and not part.order.is_over:
            self._expect(part, keys)
            return
        self._take_expected(part.order, keys)
        part.evicted += len(keys)
        self._remember_later(part, keys)

    def _own(self, part: ChainPart, run: Sequence[int]) -> None:
        """The slots of this run belong to the part."""
        owner = self._owner
        if isinstance(run, range):
            owner[run.start : run.stop] = [part] * len(run)
        else:
            for slot in run:
                owner[slot] = part
        if self._aside:
            self._aside.discard(run)
        part.slots.extend(run)
        part.resident += len(run)

    def _leave(self, part: ChainPart, resident: int, evicted: int) -> None:
        """Blocks leave the part, which has others: so many with slots, and so many that may be among the evicted ones.
        What is remembered of those may be out of date, so there may be more than the part knows of."""
        part.resident -= resident
        part.evicted = max(0, part.evicted - evicted)
        self._tidy(part)

    def _merge(self, part: ChainPart, other: ChainPart) -> None:
        """The blocks of `other`, which has no watch, follow those of `part`, which has none either. What is remembered
        of evicted blocks of `other` is lost: there is hardly ever any."""
        own = [slot for slot in other.slots if self._owner[slot] is other]
        aside = other.resident - len(own)
        for slot in own:
            self._owner[slot] = part
        part.slots.extend(own)
        if aside:
            for slot in self._aside.slots():
                if self._owner[slot] is other:
                    self._owner[slot] = part
        part.resident += other.resident
        if other.absent:
            expected = part.order.expected
            self._expect(part, [key for key in other.absent if expected.get(key) is other])
        self._known.pop(other.number, None)

    def _expect(self, part: ChainPart, keys: Sequence[bytes]) -> None:
        """These blocks of the part are absent, and may be stored soon."""
        expected = part.order.expected
        before = len(expected)
        expected.put(keys, part)
        self._totals.expected += len(expected) - before
        if part.absent is None:
            part.absent = list(keys)
            return
        part.absent += keys
        if len(part.absent) > 2 * part.expected + 64:
            part.absent = [key for key in dict.fromkeys(part.absent) if expected.get(key) is part]

    def _take_expected(self, order: Order, keys: Sequence[bytes]) -> list[ChainPart | None]:
        """The part of each of these keys that is expected, which it is no longer."""
        expected = order.expected
        before = len(expected)
        parts = expected.take(keys)
        self._totals.expected -= before - len(expected)
        return parts

    def _owned(self, run: Sequence[int]) -> Iterator[tuple[ChainPart, Sequence[int]]]:
        """The parts that visible slots belong to, each with its slots."""
        owner = self._owner
        parts: Sequence[ChainPart | None]
        parts = owner[run.start : run.stop] if isinstance(run, range) else values_at(owner, run)
        at, size = 0, len(parts)
        while at < size:
            part = parts[at]
            assert part is not None
            end = min(size, at + part.resident)
            if parts[at:end].count(part) < end - at:
                end = at + 1
                while end < size and parts[end] is part:
                    end += 1
            yield part, run[at:end]
            at = end

    def _add_absent(self, pieces: list[_Piece], order: Order, keys: Sequence[bytes]) -> None:
        for part, start, end in _runs_of(self._parts_of_absent(order, keys)):
            _add(pieces, part, end - start, (), keys[start:end])

    def _add_scattered(
        self, pieces: list[_Piece], order: Order, keys: Sequence[bytes], slots: Sequence[int | None]
    ) -> None:
        parts = iter(self._parts_of_absent(order, [key for key, slot in zip(keys, slots, strict=True) if slot is None]))
        for key, slot in zip(keys, slots, strict=True):
            if slot is None:
                _add(pieces, next(parts), 1, (), (key,))
            else:
                _add(pieces, self._owner[slot], 1, (slot,), ())

    def _parts_of_absent(self, order: Order, keys: Sequence[bytes]) -> list[ChainPart | None]:
        parts: list[ChainPart | None] = [None] * len(keys)
        if order.expected:
            parts = order.expected.find(keys)
        self._remember()
        if not self.evicted_blocks or None not in parts:
            return parts
        unknown = [key for key, part in zip(keys, parts, strict=True) if part is None]
        numbers = self.evicted_blocks.find(hash_keys(unknown, order.tag))
        if not numbers.any():
            return parts
        found = iter([self._evicted_part(number, order) for number in numbers.tolist()])
        return [next(found) if part is None else part for part in parts]

    def _evicted_part(self, number: int, order: Order) -> ChainPart | None:
        part = self._known.get(number)
        return part if part is not None and part.order is order and part.left > part.resident else None

    def _observe(self, part: ChainPart, count: int) -> None:
        """So many of its blocks were used again."""
        for watch in (part.running, part.ended):
            if watch is not None:
                self.hazards.came_back(watch.first_cell + watch.bin, count * part.weight)

    def watches_of(self, running: Running) -> list[Watch]:
        """Of the blocks of a request that has ended: see `still_watched`."""
        return [part.ended for part in running.parts if part.ended is not None]

    def still_watched(self, watches: Sequence[Watch]) -> list[int]:
        """The evictable slots of the parts of a request that has ended, without those that another request has used
        since."""
        parts = [watch.part for watch in watches if watch.part.ended is watch]
        return [slot for part in parts for slot in part.slots if self._owner[slot] is part]

    def end_anew(self, watches: Sequence[Watch], state: int, now: float) -> None:
        """The request has ended in another state than was known."""
        for watch in watches:
            part = watch.part
            if part.ended is watch and watch.home is not None:
                self._unlink(watch)
                watch.first_cell, watch.bin, watch.since = self.hazards.first_cell(state, part.past), 0, now
                self._link(watch, part.order if part.slots and watch is part.home else None)

    # -- slots ----------------------------------------------------------------------------------------------

    def publish(
        self, order: Order, keys: Sequence[bytes], slots: Sequence[int], now: float, *, fetched: bool = False
    ) -> None:
        """The keys in these slots, in ascending order, have become visible. `fetched`: they came from a store below the
        pool. Such blocks are of a class of their own, which the request that has fetched them does not change: the next
        one that uses them does."""
        parts: list[ChainPart | None] = [None] * len(keys)
        if order.expected:
            parts = self._take_expected(order, keys)
        for part, start, end in _runs_of(parts):
            some: Sequence[int] = slots[start:end]
            if some[-1] - some[0] == len(some) - 1:
                some = range(some[0], some[-1] + 1)
            if part is None or fetched:
                if part is not None:
                    self._settle(part)
                self._own_new(order, some, now, fetched=fetched)
            else:
                had_slots = bool(part.slots)
                self._own(part, some)
                if not had_slots:
                    self._settle(part)

    def restore(self, order: Order, slots: Sequence[int], pasts: bytes, now: float) -> None:
        """The blocks in these slots, in ascending order, are those of an earlier life of the pool. `pasts`: the past of
        each, as far as it is known."""
        at = 0
        while at < len(slots):
            end = at + 1
            while end < len(slots) and pasts[end] == pasts[at]:
                end += 1
            self._own_new(order, slots[at:end], now, past=pasts[at])
            at = end

    def pasts_of(self, first_slot: int, end_slot: int) -> bytes:
        """The past of the block in each of these slots; 0 for those without one."""
        return bytes([0 if part is None else part.past for part in self._owner[first_slot:end_slot]])

    def _own_new(self, order: Order, slots: Sequence[int], now: float, *, fetched: bool = False, past: int = 0) -> None:
        """Blocks that no request has used in this life of the pool."""
        part = ChainPart(next(self._serial), order, past)
        part.weight = 1.0 / len(slots)
        part.fetch = _UNUSED if fetched else 0
        self._own(part, slots)
        part.ended = Watch(part, self.hazards.first_cell(FETCHED if fetched else OTHER, past), now)
        self._link(part.ended, order)

    def remove(self, slots: Sequence[int]) -> None:
        """The blocks in these slots were removed, and nothing is remembered of them."""
        owner = self._owner
        removed = Counter(values_at(owner, slots))
        for slot in slots:
            owner[slot] = None
        if self._aside:
            self._aside.discard(slots)
        for part, num_slots in removed.items():
            assert part is not None
            part.resident -= num_slots
            self._tidy(part)

    def unhold(self, slots: Sequence[int]) -> None:
        """Nothing holds these slots any more."""
        if not self._aside:
            return
        back = [slot for slot in slots if slot in self._aside]
        self._aside.discard(back)
        parts: dict[ChainPart, None] = {}
        for slot in back:
            part = self._owner[slot]
            if part is not None:
                part.slots.append(slot)
                parts[part] = None
        for part in parts:
            self._settle(part)

    def _tidy(self, part: ChainPart) -> None:
        """Some slots are not the part's any more: drop them before they are more than half of its list."""
        if not part.resident:
            del part.slots[:]
        elif len(part.slots) > 2 * part.resident + 64:
            owner = self._owner
            part.slots = array("I", [slot for slot in part.slots if owner[slot] is part and slot not in self._aside])
        self._settle(part)

    def _settle(self, part: ChainPart) -> None:
        """The part has got or lost slots: put it where it belongs."""
        if not part.left:
            self._unwatch(part)
            self._known.pop(part.number, None)
            return
        if part.running is None and part.ended is None:  # it is being admitted
            return
        watch = part.home
        order = part.order if part.slots else None
        if watch.home is None or watch.home.order is not order:
            self._unlink(watch)
            self._link(watch, order)

    # -- eviction -------------------------------------------------------------------------------------------

    def next_list(self, order: Order) -> WatchList | None:
        """The list of the part that is evicted next in this namespace."""
        return order.oldest() if self.is_lru else order.lowest()

    def rank_of(self, watches: WatchList) -> tuple[float, float]:
        """Orders the next lists of namespaces: the lowest one is evicted from."""
        since = watches.next.since
        return (0.0 if self.is_lru else self.hazards.places.place[watches.cell]), since

    def place_of(self, part: ChainPart) -> float:
        watch = part.home
        return self.hazards.places.place[watch.first_cell + watch.bin]

    def limits(self, order: Order, keys: Sequence[bytes]) -> list[StoreLimit]:
        """What a store of these keys, which have no slot, may evict: nothing that has a higher place than they get. A
        running request's block evicts nothing with the same one either, as that may be needed as much, and a later
        store may bring it. Blocks that no request has announced evict whatever is next."""
        if self.is_lru or not order.expected:
            return [StoreLimit(len(keys), NO_LIMIT, None)]
        found: list[StoreLimit] = []
        parts, at = order.expected.find(keys), 0
        while at < len(keys):
            part, end = parts[at], at + 1
            if not at and parts.count(part) == len(keys):
                end = len(keys)
            while end < len(keys) and parts[end] is part:
                end += 1
            limit = NO_LIMIT
            if part is not None and part.running is not None:
                limit = Limit(self.place_of(part), part.request is None, part)
            found.append(StoreLimit(end - at, limit, None if part is None else part.request))
            at = end
        return found

    def evict(self, order: Order, num_slots: int, limit: Limit = NO_LIMIT) -> list[tuple[ChainPart, list[int]]]:
        """Take up to so many slots from the parts that go first, each part's end first. The caller removes their keys
        and gives them to `forget_keys`."""
        found: list[tuple[ChainPart, list[int]]] = []
        place = self.hazards.places.place
        while num_slots > 0:
            watches = self.next_list(order)
            if watches is None:
                break
            part: ChainPart = watches.next.part
            if limit is not NO_LIMIT and not self.is_lru and not limit.allows(place[watches.cell], part):
                break
            slots = self._pop(part, num_slots)
            num_slots -= len(slots)
            if slots:
                found.append((part, slots))
        return found

    def _pop(self, part: ChainPart, num_slots: int) -> list[int]:
        own, owner = part.slots, self._owner
        found: list[int] = []
        while own and len(found) < num_slots:
            some = own[len(found) - num_slots :].tolist()
            del own[len(found) - num_slots :]
            if values_at(owner, some).count(part) < len(some):
                some = [slot for slot in some if owner[slot] is part]
            if len(set(some)) < len(some):
                some = list(dict.fromkeys(some))
            free = self._held.free_of(some)
            if len(free) < len(some):
                self._aside.add(some)
                self._aside.discard(free)
            for slot in free:
                owner[slot] = None
            free.reverse()
            found += free
        part.resident -= len(found)
        part.evicted += len(found)
        if not own:
            self._settle(part)
        return found

    def forget_keys(self, part: ChainPart, keys: Sequence[bytes]) -> None:
        """These blocks of the part were evicted."""
        running = part.request
        if running is not None and self._totals.expected < _MOST_EXPECTED and not part.order.is_over:
            if not self.is_lru:  # in the order of last use, what is evicted is not brought back at the end
                running.lacks_blocks()
            part.evicted -= len(keys)
            self._expect(part, keys)
            return
        self._remember_later(part, keys)

    def remember(self, order: Order, slots: Sequence[int], slot_keys: SlotKeys) -> None:
        """The blocks in these slots are about to be evicted through `remove`."""
        for slot in slots:
            part, key = self._owner[slot], slot_keys.key_of[slot]
            if part is not None and key is not None:
                part.evicted += 1
                self.forget_keys(part, (key,))

    def _remember_later(self, part: ChainPart, keys: Sequence[bytes]) -> None:
        self._known[part.number] = part
        waiting, numbers = self._waiting.setdefault(part.order.tag, ([], array("I")))
        waiting += keys
        numbers.extend(repeat(part.number & 0xFFFFFFFF, len(keys)))
        self._num_waiting += len(keys)
        if self._num_waiting >= _MOST_WAITING:
            self._remember()
        while len(self._known) > _MOST_KNOWN:
            self._forget_part(self._known.pop(next(iter(self._known))))

    def _remember(self) -> None:
        for tag, (keys, numbers) in self._waiting.items():
            if keys:
                self.evicted_blocks.put(hash_keys(keys, tag), np.frombuffer(numbers, np.uint32))
        self._waiting, self._num_waiting = {}, 0

    def _forget_part(self, part: ChainPart) -> None:
        """Nothing is remembered of the evicted blocks of the part."""
        part.evicted = 0
        self._settle(part)

    # -- time -----------------------------------------------------------------------------------------------

    def pass_time(self, now: float) -> None:
        """Move on what has become due, up to a number of watches."""
        most, due = _MOST_MOVES, self._due
        while due and due[0][0] <= now and most > 0:
            watches = heappop(due)[2]
            watches.is_queued = False
            upper = UPPER[watches.bin]
            # The sum is the one that the queue is ordered by: `now - upper` may be rounded below a moment that is due.
            while (watch := watches.next) is not watches and watch.since + upper <= now and most > 0:
                most -= 1
                self._move_on(watch, watches.order, now)
            if watches.is_queued:
                continue
            if watches.next is not watches:
                self._queue(watches)
            elif watches.order is not None:
                watches.order.lists.pop(watches.cell, None)
        ended = self._just_ended
        while ended and most > 0 and (ended[0][0] <= now - _EXPECTED_SECONDS or self._totals.expected > _MOST_EXPECTED):
            most -= 16
            self._expect_no_longer(ended.popleft()[1])

    def _move_on(self, watch: Watch, order: Order | None, now: float) -> None:
        number = max(watch.bin + 1, bin_of(now - watch.since))
        first, part = watch.first_cell, watch.part
        self.hazards.waited(first + watch.bin, first + number, part.left * part.weight)
        self._unlink(watch)
        watch.bin = number
        self._link(watch, order)

    def _expect_no_longer(self, part: ChainPart) -> None:
        """The request of the part has ended, and what it has not stored by now will not be."""
        if part.request is not None or not part.absent:
            return
        expected = part.order.expected
        keys = [key for key in dict.fromkeys(part.absent) if expected.get(key) is part]
        self._take_expected(part.order, keys)
        part.absent, part.expected = None, 0  # of a namespace that was forgotten, too
        part.evicted += len(keys)
        if keys:
            self._remember_later(part, keys)
        else:
            self._settle(part)

    # -- lists ----------------------------------------------------------------------------------------------

    def _link(self, watch: Watch, order: Order | None) -> None:
        """Put the watch into its cell's list, of this order or of the others. It is the newest there, unless its part
        has just got its first slots, or lost its last ones: then it finds its place among the newest."""
        cell = watch.first_cell + watch.bin
        lists = self._others if order is None else order.lists
        watches = lists.get(cell)
        if watches is None:
            watches = lists[cell] = WatchList(cell, order)
        was_empty, last, steps = watches.next is watches, watches.prev, 0
        while last is not watches and steps < _MOST_STEPS and last.since > watch.since:
            last, steps = last.prev, steps + 1
        after = last.next
        watch.home, watch.prev, watch.next = watches, last, after
        last.next = after.prev = watch
        if was_empty:
            if order is not None:
                order.filled(cell)
            if not watches.is_queued:
                self._queue(watches)

    def _queue(self, watches: WatchList) -> None:
        if watches.bin < _LAST_BIN:
            watches.is_queued = True
            heappush(self._due, (watches.next.since + UPPER[watches.bin], next(self._serial), watches))

    def _unlink(self, watch: Watch) -> None:
        watches = watch.home
        if watches is None:
            return
        before, after = watch.prev, watch.next
        before.next, after.prev = after, before
        watch.home = watch.prev = watch.next = None
        if watches.next is watches and watches.order is not None:
            watches.order.emptied(watches.cell)
            if not watches.is_queued:
                del watches.order.lists[watches.cell]

    def _unwatch(self, part: ChainPart) -> None:
        for watch in (part.running, part.ended):
            if watch is not None:
                self._unlink(watch)
        part.running = part.ended = None

    # -- integrity ------------------------------------------------------------------------------------------

    def defects(self, orders: Sequence[Order], visible: set[int], held: set[int]) -> list[str]:
        """Inconsistencies. O(pool): for integrity checks."""
        found: list[str] = []
        owned = {slot for slot, part in enumerate(self._owner) if part is not None}
        if owned != visible:
            found.append("a visible slot is of no part, or another slot of one")
        found += self._miscounted_parts(orders)
        aside = self._aside.slots()
        if not aside <= held:
            found.append("a slot is set aside that nothing holds")
        listed = [slot for order in orders for slot in set(self.slots_of(order))]
        admitted = {slot for slot in visible if (own := self._owner[slot]) is not None and own.running is own.ended}
        if set(listed) | aside | admitted != visible or len(set(listed)) != len(listed):
            found.append("the order of eviction repeats or loses slots")
        if self._totals.expected != sum(len(order.expected) for order in orders):
            found.append("the count of expected blocks is wrong")
        return found

    def _miscounted_parts(self, orders: Sequence[Order]) -> Iterator[str]:
        """Inconsistencies of what parts know of their own blocks and requests."""
        resident = Counter(part for part in self._owner if part is not None)
        if any(part.resident != count for part, count in resident.items()):
            yield "the count of a part's slots is wrong"
        expected = Counter(part for order in orders for part in order.expected.owners())
        parts = dict.fromkeys([*resident, *expected])
        if any(part.expected != expected[part] or part.evicted < 0 for part in parts):
            yield "the count of a part's absent blocks is wrong"
        if any(part.request is not None and part not in part.request.parts for part in parts):
            yield "a part is of a request that does not have it"
        for part, number in expected.items():
            if len({key for key in part.absent or () if part.order.expected.get(key) is part}) != number:
                yield "a part does not know its absent blocks"

    def parts(self) -> list[ChainPart]:
        """All parts with slots. O(pool)."""
        return list(dict.fromkeys(part for part in self._owner if part is not None))

    def slots_of(self, order: Order) -> Iterator[int]:
        """Its evictable slots in the order of eviction, with those that are set aside or held. It must not change
        meanwhile."""
        lists = order.by_place()
        if self.is_lru:
            parts = sorted((watch for each in lists for watch in each), key=lambda watch: (watch.since, watch.turn))
        else:
            parts = [watch for each in lists for watch in each]
        for watch in parts:
            for slot in reversed(watch.part.slots):
                if self._owner[slot] is watch.part:
                    yield slot


_UNUSED, _USED = 2, 1
"""Of `ChainPart.fetch`: no request has used the blocks yet, and the one that has fetched them has. 0: they were
stored."""
_MOST_MERGED = 1 << 12
"""Blocks of a part: going through those of one takes half a millisecond."""


def _runs_of(parts: Sequence[ChainPart | None]) -> Iterator[tuple[ChainPart | None, int, int]]:
    """Each part with the positions, from the first to below the last, at which it stands without a gap."""
    start, size = 0, len(parts)
    while start < size:
        part, end = parts[start], start + 1
        if not start and parts.count(part) == size:  # the usual case, without a loop
            end = size
        while end < size and parts[end] is part:
            end += 1
        yield part, start, end
        start = end


class _Piece:
    """Blocks of a chain that belong to one part, or to none: `runs` of slots, and keys of absent ones."""

    __slots__ = ("absent", "count", "part", "runs")

    def __init__(self, part: ChainPart | None) -> None:
        self.part = part
        self.count = 0
        self.runs: list[Sequence[int]] = []
        self.absent: list[bytes] = []


def _without_gaps(pieces: list[_Piece]) -> list[_Piece]:
    """Whatever has used a block has used all blocks before it. So a block that is not known any more was used at least
    as often as the next one that is, and counts as one of that part: a chain does not fall apart where something was
    forgotten."""
    part: ChainPart | None = None
    for piece in reversed(pieces):
        part = piece.part = piece.part or part
    found: list[_Piece] = []
    for piece in pieces:
        if found and found[-1].part is piece.part:
            found[-1].count += piece.count
            found[-1].runs += piece.runs
            found[-1].absent += piece.absent
        else:
            found.append(piece)
    return found


def _add(pieces: list[_Piece], part: ChainPart | None, count: int, run: Sequence[int], absent: Sequence[bytes]) -> None:
    if not pieces or pieces[-1].part is not part:
        pieces.append(_Piece(part))
    piece = pieces[-1]
    piece.count += count
    if run:
        piece.runs.append(run)
    piece.absent += absent
