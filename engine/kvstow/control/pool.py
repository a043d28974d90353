"""A pool: one memory layout, and everything whose life is that of the memory; and what it knows of its sessions.

Lock: every method and attribute is used with `lock` held, except `config`, `clock`, `events` and the methods that say
so.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from threading import Lock
from typing import Literal, NamedTuple, Protocol

from kvstow.config import EngineConfig
from kvstow.control.blockevents import BlockEventLog
from kvstow.control.chains import NO_LIMIT, Limit, Running, StoreLimit
from kvstow.control.hazards import Observations, compute
from kvstow.control.index import Index, Removal
from kvstow.control.indexjournal import IndexJournal
from kvstow.control.leases import Debts, LeaseBook
from kvstow.control.namespaces import Namespace
from kvstow.control.ranktable import RankTable
from kvstow.control.requests import Requests
from kvstow.control.slots import AgeSampler, SlotMap
from kvstow.endings import PAIRS_BYTES
from kvstow.errors import ConflictError, InvalidRequestError
from kvstow.messages import DesiredState
from kvstow.stats import Counters
from kvstow.status import HOST_NAME, BypassStatus, DrainMode, DrainStatus, Refusal
from kvstow.tier.blockstore import Purged, PurgeWish

SLICE_SLOTS = 1024
"""Slots that bulk work visits in one slice. Evicting that many holds the lock for less than a millisecond."""
_EVICTIONS_PER_SLOT = 4
"""Blocks that a store may evict for each slot that it lacks. While the pool shrinks, most evictable blocks may be above
its new limit, and evicting them frees no usable slot."""
_USES_SLICES = 16
"""How many slices of slots have their uses recorded in one tick. A million slots take 64 ticks."""
ANY_SESSION = 0
"""The session number of the `begun` record for slots that sessions may still read, although they hold no block."""

logger = logging.getLogger("kvstow.engine")


class PoolAcceptance:
    """What operators have switched off in a pool (drain, bypass), and whether its blocks can be trusted. Not locked."""

    def __init__(self) -> None:
        self.closed = False
        self.integrity_error: str | None = None
        """What the last integrity check has found; None if it has found nothing wrong."""
        self.drain_mode: DrainMode | None = None
        self.drain_deadline = inf
        self.bypass_load = self.bypass_store = False
        self.bypass_until = inf

    def drain(self, mode: DrainMode | None, deadline: float = inf) -> None:
        self.drain_mode, self.drain_deadline = mode, deadline

    def drain_status(self, now: float, pending: int, leases: int) -> DrainStatus:
        """`pending`, `leases`: what is in flight and leased."""
        left = None if self.drain_deadline == inf else max(0.0, self.drain_deadline - now)
        active = self.drain_mode is not None
        return DrainStatus(active, self.drain_mode, left, active and not pending and not leases, pending, leases)

    def set_bypass(self, *, load: bool, store: bool, until: float) -> None:
        self.bypass_load, self.bypass_store, self.bypass_until = load, store, until

    def bypasses(self, what: Literal["load", "store"], now: float) -> bool:
        return (self.bypass_load if what == "load" else self.bypass_store) and now < self.bypass_until

    def bypass(self, now: float) -> BypassStatus:
        if now >= self.bypass_until:
            return BypassStatus(load=False, store=False, ttl_seconds_left=None)
        left = None if self.bypass_until == inf else self.bypass_until - now
        return BypassStatus(self.bypass_load, self.bypass_store, left)


class PoolTarget:
    """The size that a pool is to have, and what its ranks are to do about their memory. Not locked."""

    def __init__(self, capacity_slots: int) -> None:
        self.desired = DesiredState(secrets.token_hex(8), capacity_slots, number=1)
        """The desired state of every rank; ranks free memory only when its capacity is lowered. See `Pool.want`."""
        self.on_wanted: Callable[[], object] = lambda: None
        """Called when the desired state has changed, with the lock held. It must not block."""
        self.ceiling = capacity_slots
        """Slots from this number on are not allocated. It is below `capacity` while a resize vacates slots."""
        self.is_resizing = False
        self.revision = 0
        """Grows with each change of capacity, ceiling, policy or pausing, also with a change back."""

    @property
    def capacity(self) -> int:
        """Slots wanted on every rank."""
        return self.desired.capacity_slots

    def begin_resize(self, num_slots: int) -> None:
        """Raises `ConflictError` while another resize is under way."""
        if self.is_resizing:
            raise ConflictError("another resize is under way; wait for its operation, or cancel it")
        self.is_resizing = True
        self.revision += num_slots != self.ceiling
        self.ceiling = num_slots

    def undo_resize(self) -> None:
        self.is_resizing = False
        self.revision += self.ceiling != self.capacity
        self.ceiling = self.capacity


class Room(NamedTuple):
    """`slots` for the keys with the indices `accepted`, in ascending order both. `deferred`: how many of the others may
    evict nothing of what is there."""

    slots: list[int]
    accepted: Sequence[int]
    deferred: int = 0


class PoolStore(Protocol):
    """What administration knows of a `PoolTier`; its methods are described there."""

    def purge(self, wish: PurgeWish, then: Callable[[Purged], object], *, dry_run: bool = False) -> None: ...

    def begin_purge(self) -> None: ...

    def end_purge(self) -> None: ...


class PoolSession(Protocol):
    """What a pool, and what works on it, knows of a `Session`; its attributes are described there."""

    is_engine: bool
    owns_memory: bool
    session_id: int
    namespace: Namespace
    ranks: RankTable
    leases: LeaseBook
    is_lost: bool
    quarantined_slots: list[int]
    label: str
    watermark: int | None
    on_stored: Callable[[Sequence[bytes]], None] | None

    @property
    def pool(self) -> Pool: ...

    def refusal(self, what: Literal["load", "store"], now: float) -> Refusal | None: ...

    def adapt_to_pool(self) -> None: ...

    def refresh_acceptance(self) -> None: ...

    def mark_stuck(self, now: float) -> bool: ...

    def note_held(self) -> None: ...


class _LogLine(NamedTuple):
    level: int
    message: str
    values: tuple[object, ...]


class Pool:
    """Slots, the index of their blocks, counters and what operators have set, for its sessions. Each session adds
    itself to `sessions`.

    The memory is that of the ranks of the only session; in a `SharedPool` it belongs to the host.
    """

    name = HOST_NAME
    """What its host calls it."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        target: PoolTarget,
        *,
        slice_slots: int = SLICE_SLOTS,
    ) -> None:
        self.config = config
        self.clock = clock
        self.slice_slots = slice_slots
        """Slots that bulk work visits before it releases the lock."""
        self.lock = Lock()
        self.slots = SlotMap()
        self.index = Index()
        self.requests = Requests(self.index.chains, self.lock, clock, has_curve=config.curve)
        self.set_policy(config.policy)
        self.sessions: list[PoolSession] = []
        self.acceptance = PoolAcceptance()
        self.counters = Counters()
        self.ages = AgeSampler(self.index.times, self.counters.ages)
        self.events = BlockEventLog(config.event_buffer, lambda: self.capacity)
        self.target = target
        self.lost = range(0)
        """Slots whose contents some rank has lost and which `remove_lost` has yet to clear. Nothing is accepted while
        there are any."""
        self.last_op_id = 0
        self.tier: PoolStore | None = None
        """The store below it; only a `SharedPool` may have one."""
        self.journal: IndexJournal | None = None
        """Only a `SharedPool` has one, as its memory may outlive the process."""
        self.earlier: EarlierUses | None = None
        """The blocks that processes of an earlier service may still use. None once the last of these has ended."""
        self.debts = Debts(self.lock, slice_slots, self.unhold)
        self._log_lines: deque[_LogLine] = deque()
        self.make_tables(config.capacity_slots)

    def make_tables(self, num_slots: int) -> None:
        """The pool is to have so many slots: see `make_tables_in_slices`. Other threads run between the slices."""
        for _ in self.make_tables_in_slices(num_slots):
            time.sleep(0)

    def make_tables_in_slices(self, num_slots: int) -> Iterator[None]:
        """Have the tables whose size follows from that of the pool. Each step holds the lock for a bounded time. Call
        it without the lock. Not for two threads."""
        yield from self.index.chains.evicted_blocks.fit(num_slots)
        steps = self.index.slot_keys.table.fit(num_slots)
        while True:
            with self.lock:
                if next(steps, self) is self:
                    return
            yield

    @property
    def policy(self) -> str:
        """How the pool chooses what it evicts: see `parse_policy`. Without the lock."""
        return "lru" if self.index.chains.is_lru else "auto"

    def set_policy(self, policy: str) -> None:
        """Change how the pool chooses what it evicts. `policy` is a result of `parse_policy`. O(1)."""
        self.index.chains.is_lru = policy == "lru"

    def learn(self, seen: Observations | None) -> None:
        """Compute the places of blocks anew, from what a call with the lock has found due. Without the lock."""
        if seen is not None:
            places = compute(seen)
            observed = b"" if self.journal is None else seen.dump()
            with self.lock:
                self.index.chains.hazards.install(places)
                if self.journal is not None:
                    self.journal.write_learned(self.requests.endings.dump() + observed)

    def learn_from(self, learned: bytes) -> None:
        """Take up what `learn` has left in the journal of an earlier life of the pool, before any request."""
        if self.index.chains.hazards.load(learned[PAIRS_BYTES:]):
            self.requests.endings.load(learned[:PAIRS_BYTES])

    def journal_uses(self) -> bool:
        """Record how often the blocks of the next slice of slots were used. Returns False after the last slice."""
        with self.lock:
            limit = self.slots.limit
            if self.journal is None or not limit:
                return False
            start = self.journal.next_uses if self.journal.next_uses < limit else 0
            end = min(start + self.slice_slots, limit)
            self.journal.write_uses(start, self.index.chains.uses_of(start, end))
            return end < limit

    def log(self, level: int, message: str, *values: object) -> None:
        """Queue a log line for `write_log`, because a log handler may block."""
        self._log_lines.append(_LogLine(level, message, values))

    def write_log(self) -> None:
        """Write the queued lines. Without the lock."""
        while self._log_lines:
            try:
                line = self._log_lines.popleft()
            except IndexError:  # another thread was faster
                return
            logger.log(line.level, line.message, *line.values)

    def publish(
        self,
        namespace: Namespace,
        slots: Sequence[int],
        on_stored: Callable[[Sequence[bytes]], None] | None = None,
        *,
        fetched: bool = False,
    ) -> Sequence[int]:
        """Make the keys of filled slots, in ascending order, visible, and free the slots of those that were disowned
        meanwhile. Returns the slots of those that are visible. `on_stored`: called with their keys. `fetched`: they
        came from a store below the pool, and not from an engine that has computed them: such blocks are a class of
        their own until a request after the one that has fetched them uses them."""
        keys, kept = namespace.publish(slots)
        now = self.clock()
        self.index.times.mark_stored(kept, now)
        self.index.chains.publish(namespace.order, keys, kept, now, fetched=fetched)
        if len(kept) < len(slots):
            self.deallocate(sorted(set(slots).difference(kept)))
        if self.journal is not None and keys:
            self.journal.publish(kept, namespace.tag, keys)
        self.events.append("stored", keys, "", namespace.tag)
        if self.slots.leaving:  # a resize has passed these slots already
            limit = self.slots.limit
            self.remove_blocks([slot for slot in slots if slot >= limit], "resize")
            kept = [slot for slot in kept if slot < limit]
        if on_stored is not None:
            on_stored(keys)
        return kept

    def note_removal(self, removal: Removal, reason: str) -> None:
        """Count blocks that left the index, and free their slots."""
        self.deallocate(removal.freed)
        if self.journal is not None and removal.orphans:
            self.journal.begin(removal.orphans, ANY_SESSION)
        self.counters.evictions[reason] += len(removal.keys)
        self.note_removed_keys(removal, reason)

    def note_removed_keys(self, removal: Removal, reason: str) -> None:
        start = 0
        for namespace, count in removal.counts:
            self.events.append("removed", removal.keys[start : start + count], reason, namespace.tag)
            start += count

    def remove_blocks(self, slots: Iterable[int], reason: str) -> int:
        """Remove the visible blocks in these slots, including held ones. Returns their number."""
        removal = self.index.remove(slots)
        self.note_removal(removal, reason)
        return len(removal.keys)

    def reuse(self, slots: list[int]) -> list[int]:
        """The slots, used but without content, that may be filled again; the others leave the service."""
        limit = self.slots.limit
        if self.slots.leaving:
            self.deallocate([slot for slot in slots if slot >= limit])
            return [slot for slot in slots if slot < limit]
        return slots

    def deallocate(self, slots: Sequence[int]) -> None:
        """Nothing uses these slots any more, and they hold no block."""
        if self.earlier is not None:
            slots = self.earlier.keep(slots)
        if self.journal is not None and slots:
            self.journal.clear(slots)
        self.slots.deallocate(slots)

    def end_quarantine(self, slots: Sequence[int]) -> None:
        """Nobody can write these slots any more."""
        self.index.quarantined.discard(slots)
        self.deallocate(slots)

    def unhold(self, slots: Iterable[int]) -> None:
        self.deallocate(self.index.unhold(list(slots)))

    def end_holds(self, held: Iterable[tuple[int, ...]]) -> None:
        """Leases and loads have ended, so nothing needs their slots. The caller holds the lock."""
        for slots in held:
            self.unhold(slots)

    def make_room(
        self, count: int, present: Sequence[Sequence[int]], now: float, below: int | None = None
    ) -> list[int]:
        """Up to `count` slots to fill, in ascending order, whatever has to go for that; see `make_room_within`."""
        return self.make_room_within([StoreLimit(count, NO_LIMIT, None)], present, now, below).slots

    def make_room_within(
        self, limits: Sequence[StoreLimit], present: Sequence[Sequence[int]], now: float, below: int | None = None
    ) -> Room:
        """Slots to fill for keys in prefix order, below `below` unless that is None: free ones, then evicted ones, as
        far as the `limits` of the keys allow. What follows a refused block of a request is refused, too. Blocks of
        `present`, runs of slots of the same prefix, count as used and are not evicted.

        Slots are in ascending order: copies and lookups of a prefix are faster if its slots are neighbours."""
        count = sum([each.num_keys for each in limits])
        slots = self.slots.allocate(min(count, self.slots.free), below)
        if present:
            self.index.times.mark_used(present, now)
        if len(slots) == count:
            return Room(slots, range(count))
        held = list(chain.from_iterable(present))
        if held:
            self.index.hold(held)
        room = self._make_room_by_eviction(limits, slots, now, below)
        if held:
            self.unhold(held)
        return room

    def _make_room_by_eviction(
        self, limits: Sequence[StoreLimit], slots: list[int], now: float, below: int | None
    ) -> Room:
        accepted: list[int] = []
        refused: set[Running] = set()
        deferred = at = 0
        free = len(slots)
        for count, limit, running in limits:
            if running in refused:
                deferred += count
            else:
                got = min(free, count)
                free -= got
                missing = count - got
                if missing:
                    found = self._evict(missing, now, below, limit)
                    if len(found) < missing and self.debts.slots:
                        self.debts.free_slice()
                        found += self._evict(missing - len(found), now, below, limit)
                    # Nothing is left to evict but leased blocks: those of sessions that lease too much.
                    if len(found) < missing and not self.index.num_cached and self._end_excess_leases():
                        found += self._evict(missing - len(found), now, below, limit)
                    slots += found
                    missing -= len(found)
                accepted += range(at, at + count - missing)
                if missing and limit is not NO_LIMIT and self.index.num_cached:
                    deferred += missing
                    if running is not None:
                        refused.add(running)
                        running.lacks_blocks()
            at += count
        slots.sort()
        return Room(slots, accepted, deferred)

    def _evict(self, count: int, now: float, below: int | None, limit: Limit = NO_LIMIT) -> list[int]:
        """Evict blocks for up to `count` slots; none while `earlier` uses may go on."""
        slots = list[int]()
        if self.earlier is not None:
            return slots
        budget = _EVICTIONS_PER_SLOT * count
        while len(slots) < count and budget > 0:
            if below is None:
                wanted = min(count - len(slots), budget)
                removal = self.index.evict(wanted, limit)
                budget = budget - wanted if len(removal.keys) == wanted else 0  # it has looked far enough
            else:
                removal = self.index.evict_below(below, count - len(slots), budget)
                budget = 0
            if not removal.keys:
                break
            self.counters.evictions["capacity"] += len(removal.keys)
            self.ages.sample_evicted(removal.freed, now)
            self.note_removed_keys(removal, "capacity")
            slots += self.reuse(removal.freed)
        return slots

    def _end_excess_leases(self) -> bool:
        """End leases of sessions that hold more than they may when slots are short; False if there are none. What is
        left of them is ended, and freed, by later calls."""
        if self.earlier is not None:
            return False
        ended = [lease for session in self.sessions for lease in session.leases.end_excess()]
        self.end_holds([lease.slots for lease in ended])
        return bool(ended)

    def join_namespace(self, name: str) -> Namespace:
        """The namespace with this name, for one more session; see `Namespaces.join`."""
        return self.index.namespaces.join(name)

    def load_refusal(self, now: float) -> Refusal | None:
        """Why no session may load, or None."""
        engines = [session for session in self.sessions if session.is_engine and not session.is_lost]
        refusals = [session.refusal("load", now) for session in engines]
        return None if None in refusals else next(iter(refusals), None)

    @property
    def num_leases(self) -> int:
        return sum(len(session.leases) for session in self.sessions)

    @property
    def capacity(self) -> int:
        """Slots wanted on every rank."""
        return self.target.capacity

    def want(self, desired: DesiredState) -> None:
        """Set a new desired state of the ranks, with the next number."""
        target = self.target
        target.desired = replace(desired, number=target.desired.number + 1)
        for session in self.sessions:
            session.ranks.want(target.desired)
        target.on_wanted()

    def silent_ranks(self) -> list[int]:
        """Ranks that have to report before the pool has memory, and have not."""
        records = [record for session in self.sessions for record in session.ranks.records()]
        return [record.report.rank for record in records if record.reported_at is None]

    def check_size(self, capacity_slots: int) -> None:
        """Raises `InvalidRequestError` if operators cannot resize the pool to so many slots. Without the lock."""
        if capacity_slots < 1:
            raise InvalidRequestError(f"capacity_slots is {capacity_slots}; allowed: 1 or more")

    def memory_slots(self) -> int:
        """Slots that there is memory for. Blocks above them are lost."""
        return min(session.ranks.usable_slots() for session in self.sessions)

    def apply_limit(self) -> None:
        """Update the usable slots from the ceiling and the ranks. The caller removes blocks above a lower limit."""
        limit = min(self.target.ceiling, self.memory_slots())
        if limit != self.slots.limit:
            self.slots.set_limit(limit)
            self.index.set_num_slots(limit)
            for session in self.sessions:
                session.adapt_to_pool()

    def vacate(self, low: int, high: int, reason: str) -> int:
        """Remove the visible blocks of one slice of slots, `low` to at most `high`. Returns where the next one
        starts."""
        end = min(low + self.slice_slots, high)
        self.remove_blocks(range(low, end), reason)
        return end

    def tick(self) -> None:
        """Let time pass: transfers become stuck, blocks have waited longer. Call it about once a second, without the
        lock. O(what changes), with the lock held for no more than one transfer, or 1,024 parts of chains, at a time."""
        now, marked = self.clock(), True
        while marked:
            with self.lock:
                marked = any(session.mark_stuck(now) for session in self.sessions)
        with self.lock:
            self.debts.note_held()
            for session in self.sessions:
                session.note_held()
            self.index.chains.pass_time(now)
        while self.requests.end_left():
            time.sleep(0)
        if self.requests.curve is not None:
            self.requests.curve.follow(self.slots.limit, is_lru=self.index.chains.is_lru)
        for _ in range(_USES_SLICES):
            if not self.journal_uses():
                break
        self.write_log()

    @property
    def used_slots(self) -> int:
        """Slots that hold a block, or will. O(1), without the lock."""
        return self.slots.in_service - self.slots.free

    def lose(self, low: int) -> None:
        """Some rank has lost the contents of its slots from `low` on.

        This includes slots above the limit, which a resize may have lowered already. Leases break, and no store in
        flight to these slots becomes visible. The caller then calls `remove_lost` without the lock.
        """
        for session in self.sessions:
            session.leases.break_all()
        self.index.lose_contents(low, self.clock())
        if self.lost:
            low = min(low, self.lost.start)
        self._set_lost(range(low, max(self.slots.top, self.lost.stop)))

    def remove_lost(self) -> None:
        """Remove the blocks of all lost slots. Takes the lock for a slice at a time. Several threads may call it at
        once; when one returns, nothing lost is left."""
        while self.lost:
            with self.lock:
                if self.lost:
                    end = self.vacate(self.lost.start, self.lost.stop, "rank_restart")
                    self._set_lost(range(end, self.lost.stop))

    def _set_lost(self, slots: range) -> None:
        self.lost = slots or range(0)


class EarlierUses:
    """What the processes of all earlier sessions may still use. The journal does not say which slots they were reading,
    so these are all that were in use. Until the last of the processes has died, the pool evicts nothing, and the slots
    that become free are kept in quarantine. Used with the pool's lock held."""

    def __init__(self, pool: Pool, session: PoolSession) -> None:
        self.session = session
        """The session that stands for these processes. It ends with the last of them."""
        self._pool = pool
        self._was_used = pool.slots.copy()

    def keep(self, slots: Iterable[int]) -> list[int]:
        """Keep those of the slots that were in use, and return the others. O(slots given)."""
        kept: list[int] = []
        others: list[int] = []
        for slot in slots:
            (kept if self._was_used.is_used(slot) else others).append(slot)
        if kept:
            self.session.quarantined_slots += kept
            self._pool.index.quarantined.add(kept)
            if self._pool.journal is not None:
                self._pool.journal.begin(kept, ANY_SESSION)
        return others
