"""The order of eviction: the blocks of a pool in parts of chains, by class and by how long they have waited.

A `ChainPart` is a number of blocks that were used last by the same request and have the same past. When a request is
admitted, it takes all blocks of its chain into a few parts of its own. What it takes is mostly a whole part of the
request before, which changes hands at once, so an admission costs what a few parts cost and not what a thousand blocks
cost.

A `Watch` measures how long a part waits. A part has one from the start of its request, and a second one from its end. A
cell is a class and a bin of waiting time (`kvstow.control.hazards`). Each watch is in the `WatchList` of its cell, and
moves to the list of the next bin when it has waited for longer than its own bin says. A list is ordered by the
beginning of the wait, so only its oldest watch has to be compared with the clock. A queue of lists, ordered by the time
at which the oldest watch of each is due, says which lists to look at. So the passing of time costs something only for
the parts that move.

The lists of a namespace (`Order`) have the parts from whose slots blocks may be evicted. The next victim is in the list
with the lowest place that is not empty. To find it, an order keeps one integer with a bit for each cell, set if the
cell's list is not empty. The bits are in the order of the cells' places, so the lowest set bit names the list. When the
places have changed, the integer is computed anew. The oldest part of the list is evicted first, and of that part the
end of its chain.

All other watches are in lists of the pool, which serve for learning alone. They are the watches of parts without slots,
whose blocks were mostly evicted, and the watch of each part that does not decide about its eviction, such as the one
from the start of a request that has ended. Without them, the pool would see only blocks that come back before they are
evicted, or while their request runs, and the hazards would be wrong.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, count, repeat
from math import inf
from typing import Any, NamedTuple

import numpy as np

from kvstow.collector import unvisited
from kvstow.control.evictedblocks import EvictedBlocks
from kvstow.control.hazards import NUM_BINS, UPPER, USED_ONCE, Hazards, bin_of, used_again
from kvstow.control.keyhashes import hash_keys
from kvstow.control.slots import RefCounts, SlotKeys, SlotSet, values_at
from kvstow.endings import FETCHED, OTHER, RUNNING

SAME_USE = 2.0
"""A use that begins fewer than this many seconds after the one before does not count as one. Otherwise a client could
make its blocks look popular with a burst of requests."""
_LAST_BIN = NUM_BINS - 1
_MOST_MOVES = 1024
"""How many watches one call of `pass_time` moves at most, so that it does not hold the lock for long."""
_MOST_STEPS = 256
"""A watch is put before at most this many newer ones of its list. So the watch of a request that began long ago may
stand a little too late, but a long list is not searched."""
_MOST_WAITING = 4096
"""Once this many evicted keys wait to be remembered, they are put into the table together, because many at once cost
little more than one."""
_MOST_EXPECTED = 1 << 18
"""How many absent blocks of running and lately ended requests are expected at most. Further ones are remembered like
evicted ones."""
_EXPECTED_SECONDS = 60.0
"""If a block is not stored within this many seconds of the end of its request, it is remembered like an evicted one."""
_SHARDS = 64
"""How many dicts the expected blocks are spread over, so that none is large enough to keep other threads waiting when
it grows."""
_MOST_KNOWN = 1 << 15
"""How many parts with evicted blocks are known at most."""


class Watch:
    """Measures how long the blocks of a part wait for their next use, from the time `since` on, in the class whose
    first cell is `first_cell`. `home`: the list that the watch is in, or None. `turn`: the policy `lru` evicts the part
    with the lowest turn first if several have waited since the same time."""

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
    """The watches of one cell, as a ring from the oldest (`next`) to the newest (`prev`). `order`: the order of
    eviction that the list belongs to, or None if the list serves for learning alone. `is_queued`: whether the list is
    in the queue of `Chains`, which says when its oldest watch is due."""

    __slots__ = ("bin", "cell", "is_queued", "next", "order", "prev")

    def __init__(self, cell: int, order: Order | None) -> None:
        self.cell, self.bin, self.order = cell, cell % NUM_BINS, order
        self.is_queued = False
        self.next: Any = self
        self.prev: Any = self

    def __iter__(self) -> Iterator[Watch]:
        """Yield the watches, the oldest first. The list must not change meanwhile."""
        watch = self.next
        while watch is not self:
            yield watch
            watch = watch.next


class ChainPart:
    """Blocks that were used last by the same request and have the same past.

    `past`: the past of the blocks (`kvstow.control.hazards`), or 0 if no request has used them yet. `weight`: what one
    block weighs in learning. `request`: the request that has used the blocks, while it runs. The part is then among its
    `parts`. `fetch`: `_UNUSED` or `_USED` if a store below the pool has the blocks, too, as far as is known, and 0
    otherwise.

    Three numbers count the blocks, each block once. `resident` blocks have a slot. `expected` blocks have none, but may
    be stored soon because their request runs or has just ended; `Order.expected` has their keys. `evicted` blocks have
    none either, and are remembered by the number of the part. That number is rough, because `EvictedBlocks` forgets.

    `slots`: the slots of the resident blocks in the order of the chain, except the slots that `Chains` has set aside.
    It may still have slots that belong to another part by now, and may list a slot twice if it has left the part and
    come back; see `Chains._own_slots`. `absent`: the keys of the expected blocks. It may still have keys that are no
    longer expected. `by_start`: whether the start of the request decides when the part is evicted, even after the
    request has ended, as with the policy `lru`. `is_shared`: whether requests of several engines have used the blocks
    at the same time. Then a GPU that does not have the blocks may need them.
    """

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
        """How many blocks the part has, with and without a slot."""
        return self.resident + self.expected + self.evicted

    @property
    def home(self) -> Watch:
        """The watch that decides when the blocks of the part are evicted."""
        watch = self.running if self.by_start and self.running is not None else self.ended or self.running
        assert watch is not None
        return watch


class Running:
    """A request between its admission and its end.

    `engine`: the engine whose GPU has the blocks. `parts`: the parts of its chain that no other request has taken
    since, in the order of the chain, as the keys of a dict. `share`: the weight in learning of each group of
    neighbouring blocks of one class. `is_incomplete`: whether some of its blocks have no slot, because they were
    evicted or their store was refused. `on_incomplete` is called with the lock held when that becomes true.
    """

    __slots__ = ("engine", "is_incomplete", "on_incomplete", "order", "parts", "share")

    def __init__(self, order: Order, share: float, on_incomplete: Callable[[], None], engine: int = 0) -> None:
        self.order, self.share, self.on_incomplete, self.engine = order, share, on_incomplete, engine
        self.parts: dict[ChainPart, None] = {}
        self.is_incomplete = False

    def lacks_blocks(self) -> None:
        """Note that some blocks have no slot, so that they have to be stored when the request ends."""
        if not self.is_incomplete:
            self.is_incomplete = True
            self.on_incomplete()


def ignore() -> None:
    """Do nothing. This is the `on_incomplete` of a request that has ended."""


class FoundKeys(NamedTuple):
    """Where the keys of a chain are. `runs`: the slots of the leading keys that have one. `rest`: the keys that follow.
    `slots`: the slot of each of these, or None."""

    runs: Sequence[Sequence[int]]
    rest: Sequence[bytes] = ()
    slots: Sequence[int | None] = ()


class ExpectedBlocks:
    """The part of each block that has no slot but may be stored soon, because its request runs or has just ended."""

    __slots__ = ("_count", "_shards")

    def __init__(self) -> None:
        self._shards: list[dict[bytes, ChainPart]] = [{} for _ in range(_SHARDS)]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, key: bytes) -> ChainPart | None:
        return self._shards[hash(key) % _SHARDS].get(key)

    def find(self, keys: Iterable[bytes]) -> list[ChainPart | None]:
        shards = self._shards
        return [shards[hash(key) % _SHARDS].get(key) for key in keys]

    def take(self, keys: Iterable[bytes]) -> list[ChainPart | None]:
        """Return the part of each key, or None, and forget these keys."""
        shards = self._shards
        found = [shards[hash(key) % _SHARDS].pop(key, None) for key in keys]
        missing = found.count(None)
        self._count -= len(found) - missing
        if found and not missing and found.count(found[0]) == len(found):  # nearly always
            found[0].expected -= len(found)  # type: ignore[union-attr]
        else:
            for part in found:
                if part is not None:
                    part.expected -= 1
        return found

    def put(self, keys: Sequence[bytes], part: ChainPart) -> None:
        """Let these keys belong to this part from now on."""
        shards = self._shards
        for key in keys:
            shard = shards[hash(key) % _SHARDS]
            before = shard.get(key)
            if before is None:
                self._count += 1
            else:
                before.expected -= 1
            shard[key] = part
            part.expected += 1

    def parts(self) -> Iterator[ChainPart]:
        """Yield the part of each key. O(keys): for integrity checks."""
        return chain.from_iterable(shard.values() for shard in self._shards)


class _Totals:
    """Counts over all namespaces of a pool. `expected`: blocks without a slot that may be stored soon."""

    __slots__ = ("expected",)

    def __init__(self) -> None:
        self.expected = 0


class Order:
    """The evictable parts of one namespace, in lists by cell. `Chains` makes it. `is_over`: whether the namespace was
    forgotten.

    Bit `rank[cell]` of `_bits` is set if the list of the cell is not empty. The bits are valid while `_version` is that
    of the places; otherwise `lowest` computes them anew.
    """

    __slots__ = ("_bits", "_hazards", "_version", "expected", "is_over", "lists", "tag", "totals")

    def __init__(self, hazards: Hazards, tag: int, totals: _Totals) -> None:
        self._hazards, self.tag, self.totals = hazards, tag, totals
        self.is_over = False
        self.lists: dict[int, WatchList] = {}
        """The list of each cell, from the first time that it is needed until it is empty."""
        self.expected = ExpectedBlocks()
        self._bits, self._version = 0, -1

    def forget(self) -> None:
        """Note that the namespace is forgotten, because it has neither blocks nor sessions any more."""
        self.totals.expected -= len(self.expected)
        self.expected, self.is_over = ExpectedBlocks(), True

    def filled(self, cell: int) -> None:
        """Note that the list of this cell has got its first watch."""
        if self._version == self._hazards.version:
            self._bits |= 1 << self._hazards.places.rank[cell]

    def emptied(self, cell: int) -> None:
        """Note that the list of this cell has lost its last watch."""
        if self._version == self._hazards.version:
            self._bits &= ~(1 << self._hazards.places.rank[cell])

    def lowest(self) -> WatchList | None:
        """Return the list with the lowest place that is not empty, or None. O(1), or O(lists) after the places have
        changed."""
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
        """Return the list whose oldest part has waited longest, or None. O(lists)."""
        found = [each for each in self.lists.values() if each.next is not each]
        return min(found, key=lambda each: (each.next.since, each.next.turn), default=None)

    def by_place(self) -> list[WatchList]:
        """Return the lists that are not empty, in the order of eviction."""
        rank = self._hazards.places.rank
        found = [each for each in self.lists.values() if each.next is not each]
        return sorted(found, key=lambda each: rank[each.cell])


class Limit(NamedTuple):
    """What a store may evict: blocks with a place below `place`. With `also_equal`, also blocks with the same place,
    except those of `part`, to which the stored blocks themselves belong."""

    place: float = inf
    also_equal: bool = True
    part: ChainPart | None = None

    def allows(self, place: float, victim: ChainPart) -> bool:
        return place < self.place or (self.also_equal and place == self.place and victim is not self.part)


NO_LIMIT = Limit()


class StoreLimit(NamedTuple):
    """What the store of the next `num_keys` keys may evict. `running`: the running request that has these blocks, or
    None."""

    num_keys: int
    limit: Limit
    running: Running | None


class Chains:
    """The parts of all namespaces of a pool, with what is remembered of their evicted blocks. Used under the pool's
    lock. Each call is O(slots or keys given). A call that is given the time also moves at most 1,024 watches."""

    def __init__(self, hazards: Hazards, held: RefCounts) -> None:
        """`held`: the slots that must not be evicted now."""
        self.hazards, self._held = hazards, held
        self.is_lru = False
        """Whether the policy is `lru`, which evicts the blocks whose last request began longest ago, whatever their
        class."""
        self.evicted_blocks = EvictedBlocks()
        self._owner: list[ChainPart | None] = unvisited([])
        """The part of each slot. The garbage collector does not visit this list, so a part must not lead back to the
        pool once its request has ended: see `Requests.end`."""
        self.below = SlotSet()
        """The slots whose blocks the store below the pool had when it was last known. It may have evicted some since.
        If leading blocks of a chain are among these slots when their request ends, they get the state `FETCHED`."""
        self._aside = SlotSet()
        """Held slots that `evict` has taken out of the `slots` of their part, so that it does not come upon them again.
        They are put back when nothing holds them any more."""
        self._others: dict[int, WatchList] = {}
        """The lists of the watches that serve for learning alone, by cell."""
        self._due: list[tuple[float, int, WatchList]] = []
        """A heap of the lists whose watches will be due, by the time at which the oldest one is. A serial number
        decides between equal times."""
        self._serial = count(1)
        self._known: dict[int, ChainPart] = {}
        """Parts with evicted blocks, by number, in the order in which they lost the first one."""
        self._waiting: dict[int, tuple[list[bytes], array[int]]] = {}
        """Evicted keys that are not in the table yet, and the numbers of their parts, by the tag of their namespace."""
        self._num_waiting = 0
        self._totals = _Totals()
        self._just_ended: deque[tuple[float, ChainPart]] = deque()
        """Parts whose request has ended, and whose absent blocks are still expected, each with the time of that end."""

    def grow(self, num_slots: int) -> None:
        """Make room for the slots below `num_slots`."""
        self._owner.extend(repeat(None, max(0, num_slots - len(self._owner))))
        self._aside.grow(num_slots)
        self.below.grow(num_slots)

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
        """Begin to admit a request, and return it. Its chain is then given to `extend`, and `admit` ends the admission.
        For `share`, `on_incomplete` and `engine`, see `Running`."""
        self.pass_time(now)
        return Running(order, share, on_incomplete, engine)

    def extend(self, running: Running, found: FoundKeys, now: float) -> None:
        """Let a request use the next blocks of its chain, from the root on. They are not evicted before `admit`, or
        before `end` if the request was admitted already."""
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
        """End the admission of a request whose whole chain was given to `extend`. From now on its blocks may be
        evicted."""
        parts = [part for part in running.parts if part.left]
        running.parts = dict.fromkeys(parts)
        at = 0
        while at < len(parts):  # neighbouring blocks of one class count as one block in learning
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
            if part.is_shared:  # another engine may need it before the request ends
                part.ended = Watch(part, self.hazards.first_cell(OTHER, part.past), now)
                part.ended.turn = part.running.turn
                self._link(part.running, None)
            self._link(part.home, part.order if part.slots else None)

    def absorb(self, running: Running, blocks: Iterable[tuple[bytes, int | None]]) -> None:
        """Give a request that is about to end its blocks of all KV groups, in the order of the tokens that they end
        with. Each block has its key, and its slot or None while it is being stored. Blocks that are in none of the
        request's parts yet, such as blocks of sliding windows, join the part of the block before them, or of the first
        block that has one. So the end of a prefix is evicted before its beginning in all groups alike."""
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
            rest = [slot for slot in self._own_slots(part) if slot not in listed]
            part.slots = array("I", [*rest, *[slot for slot in own if slot not in self._aside]])
            self._settle(part)

    def _let_follow(self, part: ChainPart, own: list[int], key: bytes, slot: int | None) -> None:
        """Give the block to the part, unless a running request has it, or it is absent and expected already. `own`: the
        slots of the part in their new order."""
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
        """Note that a request has ended in this state. Blocks that another request has begun to use since stay with
        that request. Blocks that were given to `extend` after `admit` count as used from now on."""
        self.pass_time(now)
        for part in running.parts:
            if part.running is None and part.left:
                part.weight = running.share / part.left
                part.running = Watch(part, self.hazards.first_cell(RUNNING, part.past), now)
        if self.below:
            running.parts = dict.fromkeys(chain.from_iterable(map(self._split_below, running.parts)))
        for part in reversed(running.parts):
            part.request = None
            if part.running is None:  # all its blocks were removed
                continue
            part.by_start = self.is_lru
            if part.ended is not None:
                self._unlink(part.ended)
            part.ended = Watch(part, self.hazards.first_cell(FETCHED if part.fetch else state, part.past), now)
            part.ended.turn = next(self._serial)
            self._unlink(part.running)
            for watch in (part.running, part.ended):
                self._link(watch, part.order if part.slots and watch is part.home else None)
            if part.absent:
                self._just_ended.append((now, part))

    def _split_below(self, part: ChainPart) -> Sequence[ChainPart]:
        """Divide a part whose request ends after the leading blocks that the store below the pool has. They become a
        part of their own, of the class of what was fetched."""
        own = self._own_slots(part)
        count = self.below.leading(own)
        part.fetch = _USED if count and count == len(own) and not part.expected else 0
        if not count or part.fetch or part.running is None:
            return (part,)
        head = ChainPart(next(self._serial), part.order, part.past)
        head.weight, head.fetch, head.request = part.weight, _USED, part.request
        head.running = Watch(head, part.running.first_cell, part.running.since)
        head.running.bin, head.running.turn = part.running.bin, next(self._serial)
        part.slots = array("I", own[count:])
        part.resident -= count
        self._own(head, own[:count])
        return head, part

    def _take(self, running: Running, piece: _Piece, now: float) -> None:
        """Give the blocks of the piece to the running request, and note that they have come back. A part that was just
        fetched keeps its blocks, see `publish`."""
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
        """Return a part that has the blocks of the piece and no others, and that belongs to no request. It is the part
        that had these blocks until now if it had no others, or else a new one."""
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
        """Whether the piece, which has `resident` slots, has all blocks of its part. It may also have blocks that did
        not belong to the part, see `_without_gaps`."""
        if resident < part.resident or piece.count < part.left:
            return False
        return not part.expected or part.order.expected.find(piece.absent).count(part) == part.expected

    def _add_absent_blocks(self, part: ChainPart, keys: Sequence[bytes]) -> None:
        """Give these blocks, which have no slot, to the part."""
        if not keys:
            return
        if self._totals.expected < _MOST_EXPECTED and not part.order.is_over:
            self._expect(part, keys)
            return
        self._take_expected(part.order, keys)
        part.evicted += len(keys)
        self._remember_later(part, keys)

    def _own(self, part: ChainPart, run: Sequence[int]) -> None:
        """Give the slots of this run to the part."""
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

    def _own_slots(self, part: ChainPart) -> list[int]:
        """Return the slots of the part that are not set aside, each once. O(slots). If a slot has left the part and has
        come back, `ChainPart.slots` may have it twice."""
        owner = self._owner
        return list(dict.fromkeys([slot for slot in part.slots if owner[slot] is part]))

    def _leave(self, part: ChainPart, resident: int, evicted: int) -> None:
        """Note that `resident` blocks with a slot have left the part, and `evicted` blocks that may have been among its
        evicted ones. The table of evicted blocks may be out of date, so `evicted` may exceed what the part counts."""
        part.resident -= resident
        part.evicted = max(0, part.evicted - evicted)
        self._tidy(part)

    def _merge(self, part: ChainPart, other: ChainPart) -> None:
        """Append the blocks of `other` to those of `part`. Neither may have a watch. The evicted blocks of `other` are
        forgotten, but there are hardly ever any."""
        own = self._own_slots(other)
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
        """Note that these blocks belong to the part and have no slot, but may be stored soon."""
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
        """Stop expecting these keys. Returns the part of each, or None."""
        expected = order.expected
        before = len(expected)
        parts = expected.take(keys)
        self._totals.expected -= before - len(expected)
        return parts

    def _owned(self, run: Sequence[int]) -> Iterator[tuple[ChainPart, Sequence[int]]]:
        """Yield the parts that these visible slots belong to, each with its slots. A part may occur more than once."""
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
        """Note that `count` blocks of the part were used again."""
        for watch in (part.running, part.ended):
            if watch is not None:
                self.hazards.came_back(watch.first_cell + watch.bin, count * part.weight)

    def watches_of(self, running: Running) -> list[Watch]:
        """Return the watches that the parts of an ended request have from its end on, for `still_watched` and
        `end_anew`."""
        return [part.ended for part in running.parts if part.ended is not None]

    def still_watched(self, watches: Sequence[Watch]) -> list[int]:
        """Return the slots whose blocks no other request has used since the request of these watches has ended, except
        the slots that are set aside."""
        parts = [watch.part for watch in watches if watch.part.ended is watch]
        return [slot for part in parts for slot in self._own_slots(part)]

    def end_anew(self, watches: Sequence[Watch], state: int, now: float) -> None:
        """Move the blocks of an ended request to another state, in which they wait from now on. Blocks that another
        request has used since keep theirs."""
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
        """Note that the keys in these slots have become visible. The slots are in ascending order. `fetched`: whether
        the blocks came from a store below the pool. Such blocks stay in a class of their own when the first request
        uses them, because this is the request that has fetched them. The next one takes them into its own parts."""
        if fetched:
            self.below.add(slots)
        elif self.below:
            self.below.discard(slots)
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
        """Take in blocks that an earlier life of the pool has left in these slots, which are in ascending order.
        `pasts`: the past of each block, or 0 if it is unknown."""
        at = 0
        while at < len(slots):
            end = at + 1
            while end < len(slots) and pasts[end] == pasts[at]:
                end += 1
            self._own_new(order, slots[at:end], now, past=pasts[at])
            at = end

    def pasts_of(self, first_slot: int, end_slot: int) -> bytes:
        """Return the past of the block in each of these slots, or 0 if there is no block."""
        return bytes([0 if part is None else part.past for part in self._owner[first_slot:end_slot]])

    def _own_new(self, order: Order, slots: Sequence[int], now: float, *, fetched: bool = False, past: int = 0) -> None:
        """Make a part of blocks that no request has used in this life of the pool."""
        part = ChainPart(next(self._serial), order, past)
        part.weight = 1.0 / len(slots)
        part.fetch = _UNUSED if fetched else 0
        self._own(part, slots)
        part.ended = Watch(part, self.hazards.first_cell(FETCHED if fetched else OTHER, past), now)
        self._link(part.ended, order)

    def remove(self, slots: Sequence[int]) -> None:
        """Note that the blocks in these slots were removed. Nothing is remembered of them."""
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
        """Note that these slots are no longer held, so that blocks in them may be evicted again."""
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
        """Note that some slots have left the part. They are dropped from its list before they are more than half of
        it."""
        if not part.resident:
            del part.slots[:]
        elif len(part.slots) > 2 * part.resident + 64:
            part.slots = array("I", [slot for slot in self._own_slots(part) if slot not in self._aside])
        self._settle(part)

    def _settle(self, part: ChainPart) -> None:
        """Put the watch of a part that has got or lost slots into the right list. A part with slots is evictable, a
        part without slots serves for learning alone, and a part without blocks is not watched."""
        if not part.left:
            self._unwatch(part)
            self._known.pop(part.number, None)
            return
        if part.running is None and part.ended is None:  # the part is being admitted
            return
        watch = part.home
        order = part.order if part.slots else None
        if watch.home is None or watch.home.order is not order:
            self._unlink(watch)
            self._link(watch, order)

    # -- eviction -------------------------------------------------------------------------------------------

    def next_list(self, order: Order) -> WatchList | None:
        """Return the list whose oldest part is evicted next in this namespace, or None."""
        return order.oldest() if self.is_lru else order.lowest()

    def rank_of(self, watches: WatchList) -> tuple[float, float]:
        """Return the key for comparing the next lists of several namespaces. Blocks of the lowest one are evicted
        first."""
        since = watches.next.since
        return (0.0 if self.is_lru else self.hazards.places.place[watches.cell]), since

    def place_of(self, part: ChainPart) -> float:
        """Return the place of the blocks of a part that is watched."""
        watch = part.home
        return self.hazards.places.place[watch.first_cell + watch.bin]

    def limits(self, order: Order, keys: Sequence[bytes]) -> list[StoreLimit]:
        """Return what a store of these keys, which have no slot, may evict. No block evicts one with a higher place
        than it gets itself. A block of a running request evicts no block with the same place either: that block may be
        needed as soon, and this one can still be stored when its request ends. A block that is not expected may evict
        any block, because nothing is known of it."""
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
        """Take up to `num_slots` slots from the parts that are evicted first, from the end of each part on. Returns the
        slots by part. The caller removes their keys, and gives the keys to `forget_keys`."""
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
        """Note that these blocks of the part were evicted. While their request runs, they are expected again, because
        they are stored at its end. Otherwise they are remembered, so that their return can be observed."""
        running = part.request
        if running is not None and self._totals.expected < _MOST_EXPECTED and not part.order.is_over:
            if not self.is_lru:  # the policy `lru` does not bring evicted blocks back at the end
                running.lacks_blocks()
            part.evicted -= len(keys)
            self._expect(part, keys)
            return
        self._remember_later(part, keys)

    def remember(self, order: Order, slots: Sequence[int], slot_keys: SlotKeys) -> None:
        """Remember the blocks in these slots, which are about to be evicted through `remove`."""
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
        """Forget the evicted blocks of the part."""
        part.evicted = 0
        self._settle(part)

    # -- time -----------------------------------------------------------------------------------------------

    def pass_time(self, now: float) -> None:
        """Move the watches that have waited for longer than their bin says to the next bin, and remember the absent
        blocks of requests that ended a minute ago. Stops after a number of watches, and continues in the next call."""
        most, due = _MOST_MOVES, self._due
        while due and due[0][0] <= now and most > 0:
            watches = heappop(due)[2]
            watches.is_queued = False
            upper = UPPER[watches.bin]
            # The queue is ordered by this sum. `now - upper` may be rounded below `since` although the watch is due.
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
        """Remember the absent blocks of a part like evicted ones. Its request has ended, and will not store them any
        more."""
        if part.request is not None or not part.absent:
            return
        expected = part.order.expected
        keys = [key for key in dict.fromkeys(part.absent) if expected.get(key) is part]
        self._take_expected(part.order, keys)
        part.absent, part.expected = None, 0  # even if the namespace was forgotten, so that `keys` is empty
        part.evicted += len(keys)
        if keys:
            self._remember_later(part, keys)
        else:
            self._settle(part)

    # -- lists ----------------------------------------------------------------------------------------------

    def _link(self, watch: Watch, order: Order | None) -> None:
        """Put the watch into the list of its cell, in this order of eviction, or for learning alone if `order` is None.
        The watch is usually the newest there. If it changes lists in the middle of a bin, for example because its part
        has got its first slots or its request has ended, it is put among the newest watches by the time of its
        `since`."""
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
        """Return inconsistencies. O(pool): for integrity checks."""
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
        """Yield inconsistencies in what parts know of their own blocks and requests."""
        resident = Counter(part for part in self._owner if part is not None)
        if any(part.resident != count for part, count in resident.items()):
            yield "the count of a part's slots is wrong"
        expected = Counter(part for order in orders for part in order.expected.parts())
        parts = dict.fromkeys([*resident, *expected])
        if any(part.expected != expected[part] or part.evicted < 0 for part in parts):
            yield "the count of a part's absent blocks is wrong"
        if any(part.request is not None and part not in part.request.parts for part in parts):
            yield "a part is of a request that does not have it"
        for part, number in expected.items():
            if len({key for key in part.absent or () if part.order.expected.get(key) is part}) != number:
                yield "a part does not know its absent blocks"

    def parts(self) -> list[ChainPart]:
        """Return all parts with slots. O(pool)."""
        return list(dict.fromkeys(part for part in self._owner if part is not None))

    def slots_of(self, order: Order) -> Iterator[int]:
        """Yield the slots of the namespace in the order of eviction. Held slots are included, slots that were set aside
        are not. The order must not change meanwhile."""
        lists = order.by_place()
        if self.is_lru:
            parts = sorted((watch for each in lists for watch in each), key=lambda watch: (watch.since, watch.turn))
        else:
            parts = [watch for each in lists for watch in each]
        for watch in parts:
            yield from reversed(self._own_slots(watch.part))


_UNUSED, _USED = 2, 1
"""The values of `ChainPart.fetch` for blocks that the store below the pool has, as far as is known. `_UNUSED`: no
request has used the blocks since they were fetched. `_USED`: a request has. For all other blocks, the value is 0."""
_MOST_MERGED = 1 << 12
"""Parts are merged only if the result has fewer blocks than this, because some calls go through all blocks of a part
with the lock held. For this many blocks, that takes half a millisecond."""


def _runs_of(parts: Sequence[ChainPart | None]) -> Iterator[tuple[ChainPart | None, int, int]]:
    """Yield each run of positions that have the same part: the part, the first position, and the end."""
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
    """Neighbouring blocks of a chain that belong to the same part, or to none. `count`: how many there are. `runs`: the
    slots of the blocks that have one. `absent`: the keys of the others."""

    __slots__ = ("absent", "count", "part", "runs")

    def __init__(self, part: ChainPart | None) -> None:
        self.part = part
        self.count = 0
        self.runs: list[Sequence[int]] = []
        self.absent: list[bytes] = []


def _without_gaps(pieces: list[_Piece]) -> list[_Piece]:
    """Return the pieces of a chain after adding each piece without a part to the next piece that has one.

    A request that uses a block uses all blocks before it, too. So a block that is no longer known was used at least as
    often as the next one that is, and may count as one of the same part. Otherwise a chain would fall into ever more
    parts where blocks were forgotten.
    """
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
