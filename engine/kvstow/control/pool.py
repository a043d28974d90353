"""A pool: slots of one memory layout, everything that lives as long as their memory, and what the pool knows of its
sessions.

Every method and attribute is used with `lock` held, except `config`, `clock`, `events` and the methods that say so.
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
from kvstow.control.descriptions import NOT_DESCRIBED, StoreDescription
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
"""How many slices of slots have the pasts of their blocks recorded in one tick. A million slots take 64 ticks."""
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
        """Return the status of the drain. `pending`: how many transfers are in flight. `leases`: how many leases there
        are."""
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
        """It is called with the lock held when the desired state has changed. It must not block."""
        self.ceiling = capacity_slots
        """Slots from this number on are not allocated. It is below `capacity` while a resize vacates slots."""
        self.is_resizing = False
        self.revision = 0
        """Grows with each change of capacity, ceiling, policy or pausing, including one that reverts another."""

    @property
    def capacity(self) -> int:
        """How many slots every rank is to have."""
        return self.desired.capacity_slots

    def begin_resize(self, num_slots: int) -> None:
        """Begin a resize to `num_slots`. Raises `ConflictError` while another resize is under way."""
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
    """What `make_room_within` has found: `slots` for the keys with the indices `accepted`, both in ascending order.
    `deferred`: how many of the other keys have no slot because they may not evict the blocks that are there."""

    slots: list[int]
    accepted: Sequence[int]
    deferred: int = 0


class PoolStore(Protocol):
    """The part of a `PoolTier` that administration uses. `PoolTier` describes the methods."""

    def purge(self, wish: PurgeWish, then: Callable[[Purged], object], *, dry_run: bool = False) -> None: ...

    def begin_purge(self) -> None: ...

    def end_purge(self) -> None: ...

    def expect_context(self, context: bytes) -> None: ...


class PoolSession(Protocol):
    """The part of a `Session` that a pool, and code that works on a pool, uses. `Session` describes the attributes."""

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
    """Slots, the index of their blocks, counters and the settings of operators, for the pool's sessions. Each session
    adds itself to `sessions`.

    The memory belongs to the ranks of the only session or, in a `SharedPool`, to the host.
    """

    name = HOST_NAME
    """The host's name for the pool."""

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
        """The store below the pool. Only a `SharedPool` may have one."""
        self.journal: IndexJournal | None = None
        """Only a `SharedPool` has one, as its memory may outlive the process."""
        self.earlier: EarlierUses | None = None
        """The blocks that processes of an earlier service may still use. None once the last of these has ended."""
        self.debts = Debts(self.lock, slice_slots, self.unhold)
        self._log_lines: deque[_LogLine] = deque()
        self.make_tables(config.capacity_slots)

    def make_tables(self, num_slots: int) -> None:
        """Make the tables for `num_slots` slots; see `make_tables_in_slices`. Other threads run between the slices."""
        for _ in self.make_tables_in_slices(num_slots):
            time.sleep(0)

    def make_tables_in_slices(self, num_slots: int) -> Iterator[None]:
        """Make the tables whose size follows from that of the pool. Each step holds the lock for a bounded time. Call
        it without the lock. Only one thread at a time may do this."""
        yield from self.index.chains.evicted_blocks.fit(num_slots)
        steps = self.index.slot_keys.table.fit(num_slots)
        while True:
            with self.lock:
                if next(steps, self) is self:
                    return
            yield

    @property
    def policy(self) -> str:
        """How the pool chooses what it evicts; see `parse_policy`. The caller needs no lock."""
        return "lru" if self.index.chains.is_lru else "auto"

    def set_policy(self, policy: str) -> None:
        """Change how the pool chooses what it evicts. `policy` is a result of `parse_policy`. O(1)."""
        self.index.chains.is_lru = policy == "lru"

    def learn(self, seen: Observations | None) -> None:
        """Compute the places of blocks anew from these observations, which `Hazards.count_request` has returned. Does
        nothing for None. The caller does not hold the lock."""
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

    def journal_pasts(self) -> bool:
        """Record the pasts of the blocks in the next slice of slots. Returns False after the last slice."""
        with self.lock:
            limit = self.slots.limit
            if self.journal is None or not limit:
                return False
            start = self.journal.next_pasts if self.journal.next_pasts < limit else 0
            end = min(start + self.slice_slots, limit)
            self.journal.write_pasts(start, self.index.chains.pasts_of(start, end))
            return end < limit

    def log(self, level: int, message: str, *values: object) -> None:
        """Queue a log line for `write_log`, because a log handler may block."""
        self._log_lines.append(_LogLine(level, message, values))

    def write_log(self) -> None:
        """Write the queued lines. The caller does not hold the lock."""
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
        described: StoreDescription = NOT_DESCRIBED,
    ) -> Sequence[int]:
        """Make the keys of filled slots visible, and free the slots of keys that were disowned meanwhile. The slots are
        in ascending order. Returns the slots whose keys are visible. `on_stored` is called with the keys. `fetched`:
        whether the blocks came from a store below the pool and not from an engine that has computed them. Such blocks
        form a class of their own. The request that has fetched them does not change that, but the next one does.
        `described`: the descriptions that the engine has sent of the blocks."""
        keys, kept = namespace.publish(slots)
        now = self.clock()
        self.index.times.mark_stored(kept, now)
        self.index.chains.publish(namespace.order, keys, kept, now, fetched=fetched)
        if len(kept) < len(slots):
            self.deallocate(sorted(set(slots).difference(kept)))
        if self.journal is not None and keys:
            self.journal.publish(kept, namespace.tag, keys)
        if described:
            self.events.descriptions.show(namespace.tag, keys, kept, described)
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
            keys = removal.keys[start : start + count]
            self.events.descriptions.drop(namespace.tag, keys)
            self.events.append("removed", keys, reason, namespace.tag)
            start += count

    def remove_blocks(self, slots: Iterable[int], reason: str) -> int:
        """Remove the visible blocks in these slots, including held ones. Returns their number."""
        removal = self.index.remove(slots)
        self.note_removal(removal, reason)
        return len(removal.keys)

    def reuse(self, slots: list[int]) -> list[int]:
        """Return the slots that may be filled again. The slots are used but have no content. Slots above the limit
        leave the service."""
        limit = self.slots.limit
        if self.slots.leaving:
            self.deallocate([slot for slot in slots if slot >= limit])
            return [slot for slot in slots if slot < limit]
        return slots

    def deallocate(self, slots: Sequence[int]) -> None:
        """Free these slots, which hold no block and are not used any more."""
        if self.earlier is not None:
            slots = self.earlier.keep(slots)
        if self.journal is not None and slots:
            self.journal.clear(slots)
        self.slots.deallocate(slots)

    def end_quarantine(self, slots: Sequence[int]) -> None:
        """Free these slots of the quarantine, because no process can write them any more."""
        self.index.quarantined.discard(slots)
        self.deallocate(slots)

    def unhold(self, slots: Iterable[int]) -> None:
        self.deallocate(self.index.unhold(list(slots)))

    def end_holds(self, held: Iterable[tuple[int, ...]]) -> None:
        """Unhold the slots of leases and loads that have ended. The caller holds the lock."""
        for slots in held:
            self.unhold(slots)

    def make_room(
        self, count: int, present: Sequence[Sequence[int]], now: float, below: int | None = None
    ) -> list[int]:
        """Return up to `count` slots to fill, in ascending order. Unlike `make_room_within`, it may evict any evictable
        block."""
        return self.make_room_within([StoreLimit(count, NO_LIMIT, None)], present, now, below).slots

    def make_room_within(
        self, limits: Sequence[StoreLimit], present: Sequence[Sequence[int]], now: float, below: int | None = None
    ) -> Room:
        """Return slots to fill for keys in prefix order; only slots below `below`, unless that is None. Takes free
        slots first, and then evicts blocks as far as the `limits` of the keys allow. If a block of a request is
        refused, the later blocks of this request are refused, too. Blocks of `present`, which are runs of slots of the
        same prefix, count as used and are not evicted.

        The slots are in ascending order, because copies and lookups of a prefix are faster if its slots are
        neighbours."""
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
                    # Only leased blocks are left to evict. Leases of sessions that lease too much are ended.
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
        """Evict blocks, and return up to `count` slots to fill. Evicts none while processes of an earlier service may
        use them."""
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
        """End leases of sessions that hold more slots than they may when slots are short. Returns False if there are
        none. Ends a bounded number of leases, and leaves the others to later calls."""
        if self.earlier is not None:
            return False
        ended = [lease for session in self.sessions for lease in session.leases.end_excess()]
        self.end_holds([lease.slots for lease in ended])
        return bool(ended)

    def join_namespace(self, name: str) -> Namespace:
        """Return the namespace with this name, which has one more session now; see `Namespaces.join`."""
        return self.index.namespaces.join(name)

    def load_refusal(self, now: float) -> Refusal | None:
        """Return why no session may load, or None if there is a session that may, or no session at all."""
        engines = [session for session in self.sessions if session.is_engine and not session.is_lost]
        refusals = [session.refusal("load", now) for session in engines]
        return None if None in refusals else next(iter(refusals), None)

    @property
    def num_leases(self) -> int:
        return sum(len(session.leases) for session in self.sessions)

    @property
    def capacity(self) -> int:
        """How many slots every rank is to have."""
        return self.target.capacity

    def want(self, desired: DesiredState) -> None:
        """Set a new desired state of the ranks, with the next number."""
        target = self.target
        target.desired = replace(desired, number=target.desired.number + 1)
        for session in self.sessions:
            session.ranks.want(target.desired)
        target.on_wanted()

    def silent_ranks(self) -> list[int]:
        """Return the ranks that have not reported yet, although the pool has no memory before they do."""
        records = [record for session in self.sessions for record in session.ranks.records()]
        return [record.report.rank for record in records if record.reported_at is None]

    def check_size(self, capacity_slots: int) -> None:
        """Raise `InvalidRequestError` if operators cannot resize the pool to `capacity_slots`. The caller needs no
        lock."""
        if capacity_slots < 1:
            raise InvalidRequestError(f"capacity_slots is {capacity_slots}; allowed: 1 or more")

    def memory_slots(self) -> int:
        """Return how many slots have memory. Blocks above them are lost."""
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
        """Let time pass, so that transfers become stuck and blocks count as waiting longer. Call it about once a
        second, without the lock. O(what changes). Holds the lock for no more than one transfer, or 1,024 parts of
        chains, at a time."""
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
            if not self.journal_pasts():
                break
        self.write_log()

    @property
    def used_slots(self) -> int:
        """How many slots hold a block, are being filled or are in quarantine. O(1); the caller needs no lock."""
        return self.slots.in_service - self.slots.free

    def lose(self, low: int) -> None:
        """Note that some rank has lost the contents of its slots from `low` on.

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
    """The slots that processes of an earlier service may still use. The journal does not say which slots they were
    reading, so these are all slots that were in use. Until the last of these processes has died, the pool evicts
    nothing, and such slots are kept in quarantine when they become free. Used with the pool's lock held."""

    def __init__(self, pool: Pool, session: PoolSession) -> None:
        self.session = session
        """The session that stands for these processes. It ends with the last of them."""
        self._pool = pool
        self._was_used = pool.slots.copy()

    def keep(self, slots: Iterable[int]) -> list[int]:
        """Keep the slots that were in use in quarantine, and return the others. O(slots given)."""
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
