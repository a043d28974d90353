"""Transfers between the blocks of a session and the store of the fleet tier, and those that are under way."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvstow.control.indexjournal import fit
from kvstow.control.ops import LAST_RANK
from kvstow.control.session import Session
from kvstow.control.slots import values_at
from kvstow.messages import TierDirection, TierOp
from kvstow.results import TierSettled

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0


class PutQueue:
    """Every block that is stored in the pool waits here to be put, the oldest first. Not locked, except that
    `note_stored` may be called from any thread.

    The queue is bounded: the oldest block is dropped for a new one. While the store is full, blocks are dropped, for
    1 s at first and 30 s at most.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        """`most`: blocks that wait."""
        self._most, self._clock = most, clock
        self._noted: deque[Sequence[bytes]] = deque()
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._pause = 0.0
        self._paused_until = 0.0
        self.dropped = 0
        """Blocks that were not put because too many waited, or the store was full."""

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        """Whether anything waits to be put."""
        return bool(self._queue or self._noted)

    def note_stored(self, keys: Sequence[bytes]) -> None:
        """These blocks have just become visible in the pool."""
        self._noted.append(keys)

    def note_full(self) -> None:
        """The store had no room: drop what waits, and wait longer each time."""
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause or _FIRST_PAUSE)
        self._paused_until = self._clock() + self._pause
        self._drop_all()

    def note_put(self) -> None:
        """The store has taken what it was given."""
        self._pause = 0.0

    def take(self, count: int) -> list[bytes]:
        """Up to `count` blocks to put now."""
        self.sort_out()
        if self._clock() < self._paused_until:
            self._drop_all()
        return [self._queue.popitem(last=False)[0] for _ in range(min(count, len(self._queue)))]

    def put_back(self, keys: Sequence[bytes]) -> None:
        """These blocks were taken, and cannot be put yet."""
        self._queue.update(dict.fromkeys(keys))
        while len(self._queue) > self._most:
            self._queue.popitem(last=False)
            self.dropped += 1

    def sort_out(self) -> None:
        """Queue what was noted, within the bounds of the queue. Call it in each step in which nothing is taken."""
        while self._noted:
            self.put_back(self._noted.popleft())

    def _drop_all(self) -> None:
        self.dropped += len(self._queue)
        self._queue.clear()


class Reach(NamedTuple):
    """`end`: the first key that is not visible. `is_filling`: it is in a slot that is being filled."""

    end: int
    is_filling: bool


class TierTraffic:
    """Starts puts and fetches of one session, for its ranks. Their ends come as completions, as those of loads and
    stores do (`Session.complete`).

    Every call is safe from any thread, holds the pool's lock for O(blocks given), and never waits. Keys are in prefix
    order, root first. `most`: blocks in one transfer.
    """

    def __init__(self, session: Session, *, most: int, replicated: bool = False) -> None:
        """`replicated`: all ranks hold the same bytes, so one object for all of them is put, by rank 0. Ranks with
        memory of their own each fetch it."""
        self._session, self._pool = session, session.pool
        self.most, self._replicated = most, replicated
        self._is_closed = False

    def close(self) -> None:
        """Begin no transfer any more; what is under way goes on."""
        with self._pool.lock:
            self._is_closed = True

    def visible_until(self, keys: Sequence[bytes], start: int) -> Reach:
        """How far the keys from `start` on are visible. O(visible keys)."""
        rest = keys[start:] if start else keys
        with self._pool.lock:
            namespace = self._session.namespace
            end = start + sum(map(len, namespace.keys.leading_runs(rest)))
            return Reach(end, end < len(keys) and keys[end] in namespace.pending_stores)

    def visible(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether it is visible."""
        with self._pool.lock:
            return [slot is not None for slot in self._session.namespace.keys.slots_of(keys)]

    def absent(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that are neither visible nor being filled."""
        with self._pool.lock:
            numbers = self._session.namespace.keys.find_all(keys)
            return [key for key, number in zip(keys, numbers, strict=True) if number is None]

    def begin_put(self, fingerprint: str, keys: Sequence[bytes]) -> list[TierOp]:
        """Put those of the keys that are visible. Keeps them from eviction until then, and makes them the last ones in
        its order."""
        pool, session = self._pool, self._session
        with pool.lock:
            if self._is_closed or session.refusal("load", pool.clock()):
                return []
            slots = session.namespace.keys.slots_of(keys, session.watermark)
            found = [(key, slot) for key, slot in zip(keys, slots, strict=True) if slot is not None]
            pool.index.hold([slot for _, slot in found])
            return self._start("put", fingerprint, [key for key, _ in found], [slot for _, slot in found])

    def out_of_reach(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that are visible, but in memory that the session has not registered yet."""
        with self._pool.lock:
            end = self._session.watermark
            if end is None:
                return []
            slots = self._session.namespace.keys.slots_of(keys)
            return [key for key, slot in zip(keys, slots, strict=True) if slot is not None and slot >= end]

    def has_room(self, keys: Sequence[bytes]) -> bool:
        """Whether slots can be had to fetch all of the keys that are neither visible nor being filled, while the
        visible ones stay."""
        session, index = self._session, self._pool.index
        with self._pool.lock:
            fresh, present = session.namespace.select(keys, {})
            return len(fresh) <= session.room(kept=len(index.evictable(present)))

    def begin_fetch(self, fingerprint: str, keys: Sequence[bytes], *, whole: bool = False) -> list[TierOp]:
        """Fetch the leading ones of those keys that are neither visible nor being filled, as far as slots can be had;
        `whole`: all or none of them. Evicts as needed, but no blocks of these keys. Each transfer becomes visible on
        its own, when all ranks have finished it.

        Fetches nothing in a namespace that is dropped or forgotten, as the session does not keep it, and none of keys
        that the pool's journal could not publish."""
        pool, session = self._pool, self._session
        with pool.lock:
            now = pool.clock()
            if self._is_closed or session.namespace.is_dropped or session.refusal("store", now):
                return []
            if pool.journal is not None and not fit(keys):
                return []
            fresh, present = session.namespace.select(keys, {})
            slots = pool.make_room(len(fresh), present, now, session.watermark)
            if whole and len(slots) < len(fresh):
                pool.deallocate(slots)
                return []
            for part in self._parts(slots):
                session.namespace.begin(keys, fresh[part], slots[part])
            if pool.journal is not None:
                pool.journal.begin(slots, session.session_id)
            return self._start("fetch", fingerprint, values_at(keys, fresh[: len(slots)]), slots)

    def _parts(self, slots: Sequence[int]) -> list[slice]:
        """What each transfer has of them."""
        return [slice(first, min(first + self.most, len(slots))) for first in range(0, len(slots), self.most)]

    def _start(
        self, direction: TierDirection, fingerprint: str, keys: Sequence[bytes], slots: Sequence[int]
    ) -> list[TierOp]:
        pool = self._pool
        ranks: Collection[int] = pool.storing_ranks
        if direction == "put" and self._replicated:
            ranks = {LAST_RANK}
        now = pool.clock()
        start = self._session.ops.start_tier
        parts = ((tuple(keys[part]), tuple(slots[part])) for part in self._parts(slots))
        return [start(direction, fingerprint, some, of_those, ranks, now) for some, of_those in parts]

    def take_plans(self) -> list[tuple[int, TierOp]]:
        """Ranks, each with an op to give to it now, in order. The ops are for the boots that the ranks have now."""
        with self._pool.lock:
            return self._session.ops.take_tier_plans()

    def take_settled(self) -> list[TierSettled]:
        """All transfers that have ended since the last call, in order."""
        waiting = self._session.ops.tier_settled
        if not waiting:
            return []
        with self._pool.lock:
            settled = list(waiting)
            waiting.clear()
            return settled


class TierFetches:
    """Used by the thread of the host, except `num_blocks`. Contains a key while a fetch brings it."""

    def __init__(self, traffic: TierTraffic) -> None:
        self._traffic = traffic
        self._under_way: dict[int, tuple[int, float]] = {}
        """How many blocks each fetch has, and the worth of one."""
        self._op_of: dict[bytes, int] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._op_of

    @property
    def num_blocks(self) -> int:
        """From any thread."""
        return sum([blocks for blocks, _ in list(self._under_way.values())])

    def is_under_way(self, op_id: int) -> bool:
        return op_id in self._under_way

    def ops_of(self, keys: Sequence[bytes]) -> list[int]:
        """The fetches that these keys are part of."""
        if not self._op_of:
            return []
        ops = dict.fromkeys(map(self._op_of.get, keys))
        return [op for op in ops if op is not None]

    def begin(self, fingerprint: str, keys: Sequence[bytes], worth: float, *, whole: bool = False) -> list[int]:
        """Fetch those of the keys that the pool lacks. `worth`: how many seconds one key saves computing; `whole`: see
        `begin_fetch`."""
        ops = self._traffic.begin_fetch(fingerprint, keys, whole=whole)
        for op in ops:
            self._under_way[op.op_id] = (len(op.keys), worth)
            self._op_of.update(dict.fromkeys(op.keys, op.op_id))
        return [op.op_id for op in ops]

    def settle(self, settled: TierSettled) -> float:
        """One has ended. Returns how many seconds it saves computing."""
        for key in settled.keys:
            if self._op_of.get(key) == settled.op_id:
                del self._op_of[key]
        return self._under_way.pop(settled.op_id)[1] * settled.moved


class TierPuts:
    """Used by the thread of the host, except `num_blocks` and what `PutQueue` allows others."""

    def __init__(self, traffic: TierTraffic, clock: Callable[[], float], *, slots: int) -> None:
        """`slots`: the most that the pool may have."""
        self._traffic = traffic
        self._max_putting = max(traffic.most, slots // 8)
        self.queue = PutQueue(max(traffic.most, slots), clock)
        self._putting: dict[int, int] = {}
        """Blocks of each put under way."""

    @property
    def num_blocks(self) -> int:
        """Under way. From any thread."""
        return sum(list(self._putting.values()))

    def is_under_way(self, op_id: int) -> bool:
        return op_id in self._putting

    def begin(self, fingerprint: str) -> None:
        """Put what is due."""
        room = self._max_putting - self.num_blocks
        if room <= 0 or not (taken := self.queue.take(room)):
            return
        ops = self._traffic.begin_put(fingerprint, taken)
        self.queue.put_back(self._traffic.out_of_reach(taken))
        self._putting.update({op.op_id: len(op.keys) for op in ops})

    def settle(self, settled: TierSettled) -> None:
        """One has ended."""
        del self._putting[settled.op_id]
        if settled.full:
            self.queue.note_full()
        elif settled.moved:
            self.queue.note_put()
